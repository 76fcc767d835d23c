"""MATLAB 5 files, as far as SVHN needs them: named numeric arrays, each plain or zlib-compressed."""

import math
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from credo.data.formats.bounds import LARGEST_UNPACKED, damaged, inflate, refuse_empty_or_html
from credo.errors import IntegrityError

HEADER = 128
MATRIX, COMPRESSED = 14, 15
INT8, INT32, UINT32 = 1, 5, 6
NUMERIC_CLASSES = range(6, 14)  # double, single, and the integers up to 32 bits
COMPLEX_FLAG = 0x0800
STORED_AS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8"}

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Element:
    kind: int
    content: memoryview


@dataclass
class Cursor:
    """A place in a run of elements."""

    data: memoryview
    order: str  # "<" or ">"
    at: int = 0

    def done(self) -> bool:
        return self.at >= len(self.data)

    def next(self, aligned: bool = True) -> Element:
        """The element here. Inside a matrix elements are padded to 8 bytes, and up to 4 bytes fit into the tag."""
        kind, size = struct.unpack_from(f"{self.order}2I", self.data, self.at)
        if kind >> 16:  # small: the upper half is the size, the content stands where the size was
            kind, size, start = kind & 0xFFFF, kind >> 16, self.at + 4
            following = self.at + 8
            if size > 4:
                raise ValueError(f"a small element of {size} bytes")
        else:
            start = self.at + 8
            following = start + (size + 7) // 8 * 8 if aligned else start + size
        if start + size > len(self.data):
            raise ValueError(f"truncated: an element of {size} bytes with {len(self.data) - start} left")
        self.at = following
        return Element(kind, self.data[start : start + size])


def parse_mat(data: bytes, source: str) -> dict[str, Array]:
    """Every array of the file by its name."""
    refuse_empty_or_html(data, source)
    try:
        cursor = Cursor(memoryview(data), _byte_order(data), HEADER)
        arrays: dict[str, Array] = {}
        while not cursor.done():
            element = cursor.next(aligned=False)
            name, array = _matrix(_unpacked(element, source, cursor.order), cursor.order)
            if name in arrays:
                raise ValueError(f"two arrays are called {name!r}")
            arrays[name] = array
        return arrays
    except IntegrityError as error:
        raise damaged(source, f"a compressed array: {error}", data) from error
    except (ValueError, struct.error, MemoryError) as error:
        raise damaged(source, f"not a MATLAB 5 file of numeric arrays: {error}", data) from error


def _byte_order(data: bytes) -> str:
    mark, version = data[126:128], data[124:126]
    for letters, order in ((b"IM", "<"), (b"MI", ">")):
        if mark == letters and struct.unpack(f"{order}H", version) == (0x0100,):
            return order
    raise ValueError(f"wrong magic: version and byte order are {(version + mark).hex()}, expected 0001494d")


def _unpacked(element: Element, source: str, order: str) -> memoryview:
    if element.kind == COMPRESSED:
        content = memoryview(inflate(bytes(element.content), source, LARGEST_UNPACKED))
        inner = Cursor(content, order)
        element = inner.next(aligned=False)
        if not inner.done():
            raise ValueError(f"{len(content) - inner.at} extra bytes in a compressed array")
    if element.kind != MATRIX:
        raise ValueError(f"an element of type {element.kind} instead of an array")
    return element.content


def _matrix(content: memoryview, order: str) -> tuple[str, Array]:
    cursor = Cursor(content, order)
    flags, dimensions, name, values = (cursor.next() for _ in range(4))
    if flags.kind != UINT32 or dimensions.kind != INT32 or name.kind != INT8 or not cursor.done():
        raise ValueError("an array without its four parts (flags, dimensions, name, values)")
    (flag,) = struct.unpack_from(f"{order}I", flags.content)
    if flag & 0xFF not in NUMERIC_CLASSES or flag & COMPLEX_FLAG:
        raise ValueError(f"an array of class {flag & 0xFF}, flags {flag:#x}; only real numbers are read")
    if values.kind not in STORED_AS:
        raise ValueError(f"values stored as type {values.kind}")
    shape = [int(n) for n in np.frombuffer(dimensions.content, f"{order}i4")]
    element = np.dtype(f"{order}{STORED_AS[values.kind]}")
    if len(shape) < 2 or min(shape) < 0 or math.prod(shape) * element.itemsize != len(values.content):
        raise ValueError(f"shape {shape} does not fit {len(values.content)} bytes of {element.name}")
    array = np.frombuffer(values.content, element).reshape(shape, order="F")  # MATLAB stores columns first
    return bytes(name.content).decode("ascii"), array


def parse_svhn(data: bytes, source: str) -> tuple[Array, Array]:
    """Images (n, 3, 32, 32) uint8, labels (n,) int64 with "0" as class 0 (the file calls it 10)."""
    arrays = parse_mat(data, source)
    images, labels = arrays.get("X"), arrays.get("y")
    if images is None or images.dtype != np.uint8 or images.ndim != 4 or images.shape[:3] != (32, 32, 3):
        raise damaged(source, "'X' must hold uint8 images of shape (32, 32, 3, n)", data)
    if labels is None or labels.size != images.shape[3] or not labels.size:
        raise damaged(source, f"'y' must hold one label for each of {images.shape[3]} images", data)
    classes = labels.reshape(-1).astype(np.int64)
    if not ((labels.reshape(-1) == classes) & (classes >= 1) & (classes <= 10)).all():
        raise damaged(source, "labels must be 1..10, where 10 is the digit 0", data)
    return np.ascontiguousarray(images.transpose(3, 2, 0, 1)), classes % 10
