"""A kernel's call on tensors that stay where they are from step to step: what it wants to know of them, found once."""

from collections.abc import Sequence
from ctypes import c_int64
from struct import pack
from typing import final

from credo.kernels import native
from credo.kernels.lists import Call, Row, Steady, function_for

_UNASKED = object()


@final
class Standing:
    """`lists.call` for the rows `before`, then rows that come anew with every call, then the rows `after`."""

    def __init__(self, name: str, before: Sequence[Steady | None], after: Sequence[Steady | None] = ()):
        first, rows = before[0], [row for row in (*before, *after) if row is not None]
        assert first is not None
        self._name, self._count, self._sizes, self._numels = name, len(first), first.sizes, first.numels
        self._dtype = first.seen.dtype
        self._suits = all(
            row.seen.dtype is self._dtype and row.seen.contiguous and row.numels == first.numels
            for row in rows
        )
        self._before, self._after = (self._addresses(row) for row in (before, after))
        self._length = c_int64(self._count)
        self._asked: object = _UNASKED
        self._bare: Call | None = None  # without fresh rows

    def call(self, *fresh: Row) -> Call | None:
        """None where `lists.call` must look at everything itself, because something is not contiguous or of a kind."""
        if self._asked is _UNASKED or self._asked != native.asked_for():
            self._asked = native.asked_for()
            kernel = function_for(self._name, self._dtype) if self._suits else None
            bare = (self._before + self._after, self._sizes, self._length)
            self._bare = None if kernel is None else Call(kernel, *bare)
        if not fresh or self._bare is None:
            return self._bare
        dtype, pointers = self._dtype, []
        for row in fresh:
            if len(row) != self._count:
                return None
            for tensor, numel in zip(row, self._numels):  # noqa: B905  (asked at every step)
                if tensor.dtype is not dtype or not tensor.is_contiguous() or not tensor.is_cpu:
                    return None
                if tensor.numel() != numel:
                    return None
                pointers.append(tensor.data_ptr())
        addresses = self._before + pack(f"{len(pointers)}P", *pointers) + self._after
        return Call(self._bare.kernel, addresses, self._sizes, self._length)

    def _addresses(self, rows: Sequence[Steady | None]) -> bytes:
        return b"".join([bytes(8 * self._count) if row is None else row.seen.addresses for row in rows])
