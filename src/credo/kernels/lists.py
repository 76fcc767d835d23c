"""What the element-wise kernels share: lists of tensors as arrays of pointers, tensors as rows of memory."""

import ctypes
from collections.abc import Iterator, Sequence
from struct import pack
from typing import NamedTuple

import torch
from torch import Tensor

from credo.kernels.native import Kernel, kernel

Row = Sequence[Tensor]  # one tensor for each parameter
_SUFFIXES = {torch.float32: "f32", torch.float64: "f64"}


class Call(NamedTuple):
    """A C function and its first arguments: the addresses of all tensors, row after row, their sizes and their number.

    Arrays are packed bytes, which ctypes passes as a pointer and makes several times faster than its own arrays.
    """

    kernel: Kernel
    addresses: bytes
    sizes: bytes
    length: ctypes.c_int64


def call(name: str, *rows: Row | None) -> Call | None:
    """How to call a kernel for these tensors; None where a twin must do it. A row that is None has null pointers.

    A kernel wants all of them on the CPU and of one type, and the elements of each parameter's tensors in the same
    order without gaps. That is asked in one walk: on a small network the questions take longer than the kernel.
    """
    first = rows[0]
    if not first or (dtype := first[0].dtype) not in _SUFFIXES:
        return None
    if (function := kernel(f"{name}_{_SUFFIXES[dtype]}")) is None:
        return None
    pointers: list[int] = []
    contiguous = True
    for row in rows:
        for tensor in row or ():
            if tensor.dtype is not dtype or not tensor.is_cpu:
                return None
            contiguous = contiguous and tensor.is_contiguous()
            pointers.append(tensor.data_ptr())
        if row is None:
            pointers += [0] * len(first)
    if not contiguous and not aligned(*(row for row in rows if row is not None)):
        return None
    sizes = whole_numbers(*[tensor.numel() for tensor in first])
    return Call(function, pack(f"{len(pointers)}P", *pointers), sizes, ctypes.c_int64(len(first)))


def aligned(*rows: Row) -> bool:
    """Whether the elements of each parameter's tensors lie in the same order, without gaps."""
    if all(tensor.is_contiguous() for row in rows for tensor in row):
        return True
    return all(
        is_dense(group[0]) and all(in_order_of(t, group[0]) for t in group)
        for group in zip(*rows, strict=True)
    )


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill a stretch of memory, in whatever order (channels_last does)."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return tensor.numel() == 0
        expected *= size
    return True


def in_order_of(tensor: Tensor, other: Tensor) -> bool:
    """Whether the elements lie in memory in the same order as those of `other`."""
    return tensor.stride() == other.stride() or (tensor.is_contiguous() and other.is_contiguous())


def reordered(tensor: Tensor, other: Tensor) -> Tensor:
    """The tensor itself, or a copy with its elements in the order of `other`, which is dense."""
    return tensor if in_order_of(tensor, other) else torch.empty_like(other, dtype=tensor.dtype).copy_(tensor)


def flat(tensor: Tensor) -> Tensor:
    """A view of a dense tensor as the row of its elements in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def flats(row: Row) -> list[Tensor]:
    """`flat` for each."""
    return [tensor.view(-1) if tensor.is_contiguous() else flat(tensor) for tensor in row]


class Piece(NamedTuple):
    """The elements [begin, end) of a tensor."""

    tensor: int
    begin: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.begin


def blocks(sizes: Sequence[int], block: int, largest: int) -> Iterator[list[Piece]]:
    """Tensors of these sizes as a row, `block` elements of it at a time, in pieces of which none is larger than so."""
    pieces: list[Piece] = []
    room = block
    for k, size in enumerate(sizes):
        begin = 0
        while begin < size:
            pieces.append(Piece(k, begin, min(size, begin + min(largest, room))))
            begin, room = pieces[-1].end, room - pieces[-1].size
            if room == 0:
                yield pieces
                pieces, room = [], block
    if pieces:
        yield pieces


def cut(flat_row: Row, pieces: Sequence[Piece]) -> list[Tensor]:
    """Those pieces of tensors that are rows of memory."""
    return [flat_row[k][begin:end] for k, begin, end in pieces]


def whole_numbers(*values: int) -> bytes:
    """The values as an array of int64."""
    return pack(f"{len(values)}q", *values)


def doubles(*values: float) -> bytes:
    """The values as an array of double."""
    return pack(f"{len(values)}d", *values)
