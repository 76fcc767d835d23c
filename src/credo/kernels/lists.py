"""What the element-wise kernels share: lists of tensors as arrays of pointers, tensors as rows of memory."""

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from struct import pack
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from credo.kernels.native import Kernel, kernel

Row = Sequence[Tensor]  # one tensor for each parameter
Numbers = float | Sequence[float]  # one number for all parameters, or one for each
_SUFFIXES = {torch.float32: "f32", torch.float64: "f64"}


class Call(NamedTuple):
    """A C function and its first arguments: the addresses of all tensors, row after row, their sizes and their number.

    Arrays are packed bytes, which ctypes passes as a pointer and makes several times faster than its own arrays.
    """

    kernel: Kernel
    addresses: bytes
    sizes: bytes
    length: ctypes.c_int64


class Steady(list[Tensor]):
    """A row of tensors that stay as they are, and so are looked at once instead of at every call.

    Who makes it must make another when one of them has changed its memory, type or shape.
    """

    def __init__(self, tensors: Iterable[Tensor]):
        super().__init__(tensors)
        self.numels = [tensor.numel() for tensor in self]
        self.sizes = whole_numbers(*self.numels)
        self.seen = _walk(self)

    @cached_property
    def flats(self) -> list[Tensor]:
        return [flat(tensor.detach()) for tensor in self]


class Kept:
    """Where a draw puts the means by, and whether they are there (`done`): kernels say so themselves.

    An interrupt may come before the caller could note it.
    """

    def __init__(self, places: Row):
        self.places = places
        self.done = ctypes.c_int64(0)


class Look(NamedTuple):
    """What a kernel wants to know of a row."""

    dtype: torch.dtype | None  # of all of them, if they are on the CPU and of one type
    contiguous: bool
    addresses: bytes


def _look(row: Row) -> Look:
    return row.seen if isinstance(row, Steady) else _walk(row)


def _walk(row: Row) -> Look:
    """One, for all questions: on a small network they take longer than the kernel."""
    dtype, contiguous, pointers = row[0].dtype if row else None, True, []
    for tensor in row:
        if tensor.dtype is not dtype or not tensor.is_cpu:
            return Look(None, False, b"")
        contiguous = contiguous and tensor.is_contiguous()
        pointers.append(tensor.data_ptr())
    return Look(dtype, contiguous, pack(f"{len(pointers)}P", *pointers))


def call(name: str, *rows: Row | None, stacked: bool = False) -> Call | None:
    """How to call a kernel for these tensors; None where a twin must do it. A row that is None has null pointers.

    A kernel wants all of them on the CPU and of one type, and the elements of each parameter's tensors in the same
    order without gaps. It goes by the sizes of the first row, which those of the others must have: unless `stacked`,
    where the caller knows how many of the one there are for each of the other.
    """
    first = rows[0]
    if not first or (function := function_for(name, (seen := _look(first)).dtype)) is None:
        return None
    nulls, looks = Look(seen.dtype, True, bytes(8 * len(first))), [seen]
    for row in rows[1:]:
        look = nulls if row is None else seen if row is first else _look(row)
        if look.dtype is not seen.dtype or not (stacked or row is None or numels(row) == numels(first)):
            return None
        looks.append(look)
    if not all(look.contiguous for look in looks) and not aligned(*[row for row in rows if row is not None]):
        return None
    sizes = first.sizes if isinstance(first, Steady) else whole_numbers(*numels(first))
    return Call(function, b"".join([look.addresses for look in looks]), sizes, ctypes.c_int64(len(first)))


def each(numbers: Numbers, count: int) -> Sequence[float]:
    """One number for each of `count` parameters."""
    return [float(numbers)] * count if isinstance(numbers, float | int) else numbers


def is_number(value: Numbers | Row) -> TypeGuard[Numbers]:
    """Whether there is a number, or one for each parameter, and not a tensor for each."""
    return isinstance(value, float | int) or (len(value) > 0 and not isinstance(value[0], Tensor))


def function_for(name: str, dtype: torch.dtype | None) -> Kernel | None:
    """The kernel of that name for tensors of that type, where there is one."""
    return kernel(f"{name}_{_SUFFIXES[dtype]}") if dtype in _SUFFIXES else None


def numels(row: Row) -> list[int]:
    """The number of elements of each."""
    return row.numels if isinstance(row, Steady) else [tensor.numel() for tensor in row]


def aligned(*rows: Row) -> bool:
    """Whether the elements of each parameter's tensors lie in the same order, without gaps."""
    if all(_contiguous(row) for row in rows):
        return True
    return all(
        is_dense(group[0]) and all(in_order_of(t, group[0]) for t in group)
        for group in zip(*rows, strict=True)
    )


def _contiguous(row: Row) -> bool:
    return row.seen.contiguous if isinstance(row, Steady) else all(tensor.is_contiguous() for tensor in row)


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
    return tensor.view(-1) if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))


def flats(row: Row) -> list[Tensor]:
    """`flat` for each."""
    return row.flats if isinstance(row, Steady) else [flat(tensor) for tensor in row]


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
    parts = []
    for k, begin, end in pieces:
        whole = flat_row[k]
        parts.append(whole if end - begin == whole.numel() else whole[begin:end])
    return parts


def whole_numbers(*values: int) -> bytes:
    """The values as an array of int64."""
    return pack(f"{len(values)}q", *values)


def doubles(*values: float) -> bytes:
    """The values as an array of double."""
    return pack(f"{len(values)}d", *values)
