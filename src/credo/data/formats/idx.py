"""The idx format of MNIST: two zero bytes, a type, the number of dimensions, their sizes, the values."""

import math
import struct

import torch
from torch import Tensor

from credo.data.formats.bounds import damaged, refuse_empty_or_html

UNSIGNED_BYTE = 0x08


def parse_idx(data: bytes, source: str, dimensions: int) -> Tensor:
    """The unsigned bytes of an idx file (unpacked) with that many dimensions."""
    refuse_empty_or_html(data, source)
    magic = bytes([0, 0, UNSIGNED_BYTE, dimensions])
    if data[:4] != magic:
        raise damaged(source, f"wrong magic number {data[:4].hex()}, expected {magic.hex()}", data)
    header = 4 + 4 * dimensions
    if len(data) < header:
        raise damaged(source, f"truncated inside its header: {len(data)} of {header} bytes", data)
    shape = struct.unpack(f">{dimensions}I", data[4:header])
    expected = header + math.prod(shape)
    if len(data) != expected:
        state = "truncated" if len(data) < expected else "too long"
        raise damaged(source, f"{state}: shape {shape} needs {expected} bytes, it holds {len(data)}", data)
    if expected == header:
        raise damaged(source, f"it holds no values: shape {shape}", data)
    values = torch.frombuffer(bytearray(memoryview(data)[header:]), dtype=torch.uint8)
    return values.view(shape)


def parse_images(data: bytes, source: str) -> Tensor:
    """(n, 1, height, width), uint8."""
    return parse_idx(data, source, 3).unsqueeze(1)


def parse_labels(data: bytes, source: str, classes: int) -> Tensor:
    """(n,), int64, each in 0..classes − 1."""
    labels = parse_idx(data, source, 1)
    if int(labels.max()) >= classes:
        raise damaged(source, f"label {int(labels.max())} is outside 0..{classes - 1}", data)
    return labels.long()
