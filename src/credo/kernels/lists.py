"""What the element-wise kernels share: lists of tensors as arrays of pointers, tensors as rows of memory."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from credo.kernels.native import Kernel, kernel, suffix

Row = Sequence[Tensor]  # one tensor for each parameter


def native(name: str, *rows: Row) -> Kernel | None:
    """The C function for these tensors; None where one is not on the CPU, or not of the first one's type."""
    dtype = rows[0][0].dtype if rows[0] else None
    if dtype is not torch.float32 and dtype is not torch.float64:
        return None
    if not all(tensor.is_cpu and tensor.dtype is dtype for row in rows for tensor in row):
        return None
    return kernel(f"{name}_{suffix(dtype)}")


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


def addresses(*rows: Row | None) -> ctypes.Array[ctypes.c_void_p]:
    """Pointers to all tensors, row after row; a row that is None has null pointers, as many as the first."""
    absent = [None] * len(rows[0] or ())
    pointers = [p for row in rows for p in (absent if row is None else [tensor.data_ptr() for tensor in row])]
    return (ctypes.c_void_p * len(pointers))(*pointers)


def doubles(*values: float) -> ctypes.Array[ctypes.c_double]:
    """The values as an array of double."""
    return (ctypes.c_double * len(values))(*values)
