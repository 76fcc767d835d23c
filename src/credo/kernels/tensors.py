"""What the element-wise kernels share: lists of tensors as arrays of pointers, tensors as rows of memory.

`TensorList` is how an algorithm hands over tensors that it uses at every step: addresses, sizes and types are looked at
once, and again when something has changed. An algorithm never sees them. `MeanBackup` keeps the means while the
parameters hold a sample.
"""

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from operator import attrgetter, is_
from struct import pack
from typing import NamedTuple, TypeGuard, final

import torch
from torch import Tensor

from credo.errors import CallOrderError
from credo.kernels.native import Kernel, asked_for, kernel
from credo.kernels.scratch import expect_large_blocks

Row = Sequence[Tensor]  # one tensor for each parameter
is_on_cpu = attrgetter("is_cpu")  # to be mapped over tensors
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


@final
class TensorList(list[Tensor]):
    """Tensors that are looked at once instead of at every call; it is not to be changed.

    What was seen holds while they are `current`; kernels look again when they are not.
    """

    def __init__(self, tensors: Iterable[Tensor], starts: Sequence[int] | None = None):
        """`starts` says which pieces of longer ones they are: the place there of the first element of each."""
        super().__init__(tensors)
        self.starts = starts
        self._look()

    def look(self) -> "RowLook":
        """What a kernel wants to know of them, as they are now."""
        if not self.current():
            self._look()
        return self.seen

    def _look(self) -> None:
        starts = self.starts
        self.__dict__.clear()
        self.starts = starts
        self.seen = _walk(self)
        self.numels = self.seen.numels
        self.sizes = whole_numbers(*self.numels)
        self._known = [(t, t.data_ptr(), t.dtype, t.shape, t.stride()) for t in self if t.is_cpu]

    def current(self) -> bool:
        """Whether all are where they were, of the same type, shape and order; unknown, so False, on a device."""
        if len(self._known) != len(self):
            return False
        for tensor, address, dtype, shape, stride in self._known:
            if (
                tensor.data_ptr() != address
                or tensor.dtype is not dtype
                or tensor.shape != shape
                or tensor.stride() != stride
                or not tensor.is_cpu
            ):
                return False
        return True

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Whether it is of these very tensors. Equal ones are not enough, and comparing them would take long."""
        return len(self) == len(tensors) and all(map(is_, self, tensors))

    @cached_property
    def flats(self) -> list[Tensor]:
        return [flat(tensor.detach()) for tensor in self]

    @cached_property
    def buffers(self) -> "TensorList":
        """Memory for a copy of each; kept between steps, because fresh pages are slow."""
        return TensorList([torch.empty_like(tensor.detach()) for tensor in self])


@final
class Backup:
    """Where a draw puts the means, and whether they are there (`done`): kernels say so themselves.

    An interrupt may come before the caller could note it.
    """

    def __init__(self, places: Row):
        self.places = places
        self.done = ctypes.c_int64(0)

    @property
    def taken(self) -> bool:
        """Whether the means are there, and no longer in the parameters."""
        return bool(self.done.value)


@final
class MeanBackup:
    """Means that are put back at the end of a block, whatever has happened.

    A draw puts the mean away itself, in one pass over both. A step that follows at once need not wait for the mean to
    come back either: it reads it where it is, and writes the new one into the parameters (`late`).
    """

    def __init__(self) -> None:
        self.late = False  # until `restore`, samples stay where they are, for an update that asks for them
        self.away: list[tuple[TensorList, Backup]] = []  # in the order in which they were put away
        expect_large_blocks()  # what comes and goes with every backward pass stays at hand too

    def take(self, parameters: TensorList) -> Backup:
        """Where the means are, or where a draw that follows puts them.

        Those that are away are so since the sample before. Backups are layers: what was put away last comes back first.
        """
        return self.taken(parameters) or self._new(parameters)

    def _new(self, parameters: TensorList) -> Backup:
        parameters.look()
        backup = Backup(parameters.buffers)
        self.away.append((parameters, backup))
        return backup

    @torch.no_grad()
    def keep(self, parameters: TensorList) -> Backup:
        """Puts what is in the parameters away now, whatever will be written over it."""
        backup = self._new(parameters)
        if parameters:
            torch._foreach_copy_(list(backup.places), [p.detach() for p in parameters])
        backup.done.value = 1
        return backup

    def taken(self, parameters: TensorList) -> Backup | None:
        """Where the means are, if not in the parameters; if only some are away, all are put back."""
        for known, backup in self.away:
            if backup.done.value and (known is parameters or known.holds(parameters)):
                return backup
        if self.away:
            wanted = set(map(id, parameters))
            if any(id(p) in wanted for known, _ in self.away for p in known):
                self.restore()
        return None

    def forget(self, backup: Backup | None) -> None:
        """The parameters hold new means."""
        self.away = [entry for entry in self.away if entry[1] is not backup]

    @torch.no_grad()
    def restore(self) -> None:
        """Puts all means back that are away."""
        self.late = False
        for parameters, backup in reversed(self.away):
            if backup.taken and parameters:  # a model of normalisation layers alone has no samples
                torch._foreach_copy_([p.detach() for p in parameters], list(backup.places))
        self.away = []


class RowLook(NamedTuple):
    """What a kernel wants to know of a row."""

    dtype: torch.dtype | None  # of all of them, if they are on the CPU and of one type
    contiguous: bool
    addresses: bytes
    numels: list[int]  # the number of elements of each


def _walk(row: Row) -> RowLook:
    """One, for all questions: on a small network they take longer than the kernel."""
    dtype, contiguous, pointers, numels = row[0].dtype if row else None, True, [], []
    for tensor in row:
        numels.append(tensor.numel())
        if tensor.dtype is not dtype or not tensor.is_cpu:
            dtype = None
        if dtype is not None:
            contiguous = contiguous and tensor.is_contiguous()
            pointers.append(tensor.data_ptr())
    if dtype is None:
        return RowLook(None, False, b"", numels)
    return RowLook(dtype, contiguous, pack(f"{len(pointers)}P", *pointers), numels)


def call(name: str, *rows: Row | None, stacked: bool = False) -> Call | None:
    """How to call a kernel for these tensors; None where the reference must do it. A row may be None: null pointers.

    A kernel wants all of them on the CPU and of one type, and the elements of each parameter's tensors in the same
    order without gaps. It goes by the sizes of the first row, which those of the others must have: unless `stacked`,
    where the caller knows how many of the one there are for each of the other.
    """
    first = rows[0]
    if not first:
        return None
    seen = first.look() if isinstance(first, TensorList) else _walk(first)
    function = _functions.get((name, seen.dtype, asked_for())) or _function(name, seen.dtype)
    if function is None:
        return None
    addresses, contiguous, nulls = [seen.addresses], seen.contiguous, bytes(8 * len(first))
    for row in rows[1:]:
        if row is None:
            addresses.append(nulls)
            continue
        look = seen if row is first else row.look() if isinstance(row, TensorList) else _walk(row)
        if look.dtype is not seen.dtype or not (stacked or look.numels == seen.numels):
            return None
        contiguous = contiguous and look.contiguous
        addresses.append(look.addresses)
    if not contiguous and not aligned(*[row for row in rows if row is not None]):
        return None
    sizes = first.sizes if isinstance(first, TensorList) else whole_numbers(*seen.numels)
    return Call(function, b"".join(addresses), sizes, ctypes.c_int64(len(first)))


_functions: dict[tuple[str, torch.dtype | None, str | None], Kernel] = {}  # those that were asked for


def _function(name: str, dtype: torch.dtype | None) -> Kernel | None:
    """The kernel for elements of a type; None where there is none."""
    found = kernel(f"{name}_{_SUFFIXES[dtype]}") if dtype in _SUFFIXES else None
    if found is not None:
        _functions[name, dtype, asked_for()] = found
    return found


def each(numbers: Numbers, count: int) -> Sequence[float]:
    """One number for each of `count` parameters."""
    return [float(numbers)] * count if isinstance(numbers, float | int) else numbers


def is_number(value: Numbers | Row) -> TypeGuard[Numbers]:
    """Whether there is a number, or one for each parameter, and not a tensor for each."""
    return isinstance(value, float | int) or (len(value) > 0 and not isinstance(value[0], Tensor))


def numels(row: Row) -> list[int]:
    """The number of elements of each."""
    return row.look().numels if isinstance(row, TensorList) else [tensor.numel() for tensor in row]


def require_same_sizes(*rows: Row) -> None:
    """What would be read or written beyond its end, or repeated in silence, is an error."""
    for k, tensors in enumerate(zip(*rows, strict=True)):
        sizes = [tensor.numel() for tensor in tensors]
        if len(set(sizes)) > 1:
            raise CallOrderError(
                f"the size of tensor {k} of a list must be that of its fellows in the other lists, got {sizes}. One of "
                "them was replaced: construct the optimiser after changing the model."
            )


def aligned(*rows: Row) -> bool:
    """Whether the elements of each parameter's tensors lie in the same order, without gaps."""
    if all(_contiguous(row) for row in rows):
        return True
    return all(
        is_dense(group[0]) and all(in_order_of(t, group[0]) for t in group)
        for group in zip(*rows, strict=True)
    )


def _contiguous(row: Row) -> bool:
    return (
        row.look().contiguous
        if isinstance(row, TensorList)
        else all(tensor.is_contiguous() for tensor in row)
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
    return tensor.view(-1) if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))


def by_device(row: Row) -> list[list[int]]:
    """The places of the tensors of each device, in the order of the devices' first ones."""
    places: dict[torch.device, list[int]] = {}
    for k, tensor in enumerate(row):
        places.setdefault(tensor.device, []).append(k)
    return list(places.values())


def flats(row: Row) -> list[Tensor]:
    """`flat` for each."""
    if isinstance(row, TensorList):
        row.look()
        return row.flats
    return [flat(tensor) for tensor in row]


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
    left = block
    for k, size in enumerate(sizes):
        begin = 0
        while begin < size:
            pieces.append(Piece(k, begin, min(size, begin + min(largest, left))))
            begin, left = pieces[-1].end, left - pieces[-1].size
            if left == 0:
                yield pieces
                pieces, left = [], block
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
