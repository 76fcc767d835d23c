"""Street View House Numbers, cropped digits: train_32x32.mat and test_32x32.mat; either alone will do.

scipy reads the MATLAB 5 files. Every array's beginning is checked before: scipy trusts what it says.
"""

import io
import math
import struct
import zlib
from typing import Any

import numpy as np
import torch

from credo.data.examples import Examples, Normalise, Splits
from credo.data.verify import LARGEST_UNPACKED, Folder, check_content, damaged
from credo.errors import UnsupportedOperation

NORMALISE = Normalise((0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970))
HEADER = 128  # bytes
MATRIX, COMPRESSED = 14, 15  # the elements a file consists of
IMAGES, LABELS = "X", "y"
BEGINNING = 1024  # bytes of an array that hold all but its values
INT8, INT32, UINT32 = 1, 5, 6
STORED = (1, 2, 3, 4, 5, 6, 7, 9)  # integers up to 32 bits, single, double
NUMERIC = range(6, 14)  # classes: double, single, and the integers up to 32 bits
NOT_PLAIN = 0x0E00  # flags: complex, global, logical

Array = np.ndarray[Any, Any]


def read_svhn(folder: Folder) -> Splits:
    halves = {half: f"{half}_32x32.mat" for half in ("train", "test")}
    there = [half for half, name in halves.items() if folder.has(name)] or ["test"]
    read = {}
    for half in there:
        images, labels = parse_svhn(folder.read(halves[half]), folder.where(halves[half]))
        read[half] = Examples(torch.from_numpy(images), torch.from_numpy(labels))
    none = next(iter(read.values())).subset([])
    return Splits("svhn", read.get("train", none), read.get("test", none), tuple("0123456789"), NORMALISE)


def parse_svhn(data: bytes, source: str) -> tuple[Array, Array]:
    """Images (n, 3, 32, 32) uint8, labels (n,) int64 with "0" as class 0 (the file calls it 10)."""
    check_content(data, source)
    try:
        _check_elements(data)
        arrays = _arrays(data)
    except UnsupportedOperation:
        raise
    except Exception as error:  # scipy raises a dozen types for damaged files
        why = f"not a MATLAB 5 file of two arrays: {error or type(error).__name__}"
        raise damaged(source, why, data) from error
    images, labels = arrays.get(IMAGES), arrays.get(LABELS)
    if images is None or images.dtype != np.uint8 or images.ndim != 4 or images.shape[:3] != (32, 32, 3):
        raise damaged(source, "'X' must hold uint8 images of shape (32, 32, 3, n)", data)
    if labels is None or labels.size != images.shape[3] or not labels.size:
        raise damaged(source, f"'y' must hold one label for each of {images.shape[3]} images", data)
    classes = labels.reshape(-1).astype(np.int64)
    if not ((labels.reshape(-1) == classes) & (classes >= 1) & (classes <= 10)).all():
        raise damaged(source, "labels must be 1..10, where 10 is the digit 0", data)
    return np.ascontiguousarray(images.transpose(3, 2, 0, 1)), classes % 10


def _check_elements(data: bytes) -> None:
    """The file's header, and that every element of it lies inside of it and is an array of real numbers."""
    version, mark = data[124:126], data[126:128]
    order = {b"IM": "<", b"MI": ">"}.get(mark)
    if order is None or struct.unpack(f"{order}H", version) != (0x0100,):
        raise ValueError(
            f"wrong magic: version and byte order are {(version + mark).hex()}, expected 0001494d"
        )
    at, names = HEADER, list[bytes]()
    while at < len(data):
        kind, size = struct.unpack_from(f"{order}2I", data, at)
        start, at = at + 8, at + 8 + size
        if at > len(data):
            raise ValueError(f"truncated: an element of {size} bytes with {len(data) - start} left")
        content = data[start : min(at, start + BEGINNING)]
        if kind == COMPRESSED:
            content = zlib.decompressobj().decompress(content, BEGINNING)
            (kind,) = struct.unpack_from(f"{order}I", content)
            content = content[8:]
        if kind != MATRIX:
            raise ValueError(f"an element of type {kind} instead of an array")
        names.append(_check_array(content, order))
    if len(set(names)) < len(names):
        raise ValueError(f"two arrays of one name among {names}")


def _check_array(content: bytes, order: str) -> bytes:
    """What scipy follows without a look (a wrong type ends the process); the array's name."""
    flags_kind, flags_size, flags, _, kind, size = struct.unpack_from(f"{order}6I", content)
    if (flags_kind, flags_size) != (UINT32, 8) or flags & 0xFF not in NUMERIC or flags & NOT_PLAIN:
        raise ValueError(f"an array of class {flags & 0xFF}, flags {flags:#x}; only real numbers are read")
    shape = struct.unpack_from(f"{order}{size // 4}i", content, 24)
    if kind != INT32 or size % 4 or len(shape) < 2 or not 0 <= math.prod(shape) <= LARGEST_UNPACKED:
        raise ValueError(f"an array of shape {shape}")
    kind, name, at = _element(content, 24 + -(-size // 8) * 8, order)
    values_kind, _, _ = _element(content, at, order)
    if kind != INT8 or values_kind not in STORED:
        raise ValueError(f"a name of type {kind} and values of type {values_kind}")
    return name


def _element(content: bytes, at: int, order: str) -> tuple[int, bytes, int]:
    """Type and content of the element here, and where the next one is; up to 4 bytes fit into the tag."""
    kind, size = struct.unpack_from(f"{order}2I", content, at)
    if kind >> 16:
        return kind & 0xFFFF, content[at + 4 : at + 4 + (kind >> 16)], at + 8
    return kind, content[at + 8 : at + 8 + size], at + 8 + -(-size // 8) * 8


def _arrays(data: bytes) -> dict[str, Array]:
    try:
        from scipy.io import loadmat  # type: ignore[import-untyped]
    except ImportError as error:
        raise UnsupportedOperation("SVHN's files are read with scipy: pip install scipy") from error
    found: dict[str, Array] = loadmat(io.BytesIO(data), variable_names=(IMAGES, LABELS))
    return {name: array for name, array in found.items() if isinstance(array, np.ndarray)}
