"""Memory that is kept between calls: scratch, one set of buffers per Python thread, and results that are lent.

torch's CPU allocator gives memory back to the system at once, and touching fresh pages costs more than many kernels
do: without reuse the pure-torch path takes half as long again on a small network.
"""

import atexit
import math
import sys
import threading
from collections import Counter
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor

LIMIT = 24 << 20  # bytes that all the buffers of one kernel may have together
SHELF = 64 << 20  # bytes that may wait to be lent again
VIEWS = 512  # of buffers, in the shapes that were asked for; making one takes longer than many an operation
BRIEF = 31 << 20  # bytes of one block that comes and goes; above 32 MB glibc learns nothing from it
SMALL = 64 << 10  # bytes: below, the C library has memory at hand, and keeping account takes longer

_kept = threading.local()
_shelf: dict[tuple[tuple[int, ...], torch.dtype], list[Tensor]] = {}
_wanted: Counter[tuple[tuple[int, ...], torch.dtype]] = Counter()  # how many were ever lent at a time


def workspace(name: str, size: int, like: Tensor) -> int:
    """The address of `size` elements of scratch on the CPU, for kernels that need no tensor."""
    kept: dict[Any, Any] = _kept.__dict__
    key = (name, like.dtype)
    known = kept.get(key)
    if known is None or known[0] < size:
        buffer = scratch(name, (size,), like)
        known = kept[key] = (size, buffer.data_ptr(), buffer)
    address: int = known[1]
    return address


def scratch(name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """An uninitialised tensor of `shape` with the type and device of `like`; the next call of that `name` reuses it."""
    if not like.is_cpu:
        return like.new_empty(
            shape
        )  # other devices' allocators keep memory themselves, and know about streams
    views: dict[Any, Tensor] = _kept.__dict__.setdefault("views", {})
    key = (name, like.dtype, shape)
    view = views.get(key)
    if view is None:
        view = _new_view(name, shape, like.dtype)
        views[key] = view
    return view


def _new_view(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Of the buffer with that name; where it is too small, of a new one, and those of the old are forgotten."""
    buffers: dict[tuple[str, torch.dtype], Tensor] = _kept.__dict__.setdefault("buffers", {})
    buffer, size = buffers.get((name, dtype)), torch.Size(shape).numel()
    with torch.inference_mode(False):  # else it would be an inference tensor, of no use to a later backward
        if buffer is None or buffer.numel() < size:
            buffer = buffers[name, dtype] = torch.empty(size, dtype=dtype)
            _forget_views(name, dtype)
        elif len(_kept.__dict__["views"]) >= VIEWS:
            _kept.__dict__["views"].clear()
        return buffer[:size].view(shape)


def _forget_views(name: str, dtype: torch.dtype) -> None:
    views = _kept.__dict__["views"]
    for key in [key for key in views if key[:2] == (name, dtype)]:
        del views[key]


def lend(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """An uninitialised tensor of `shape` with the type and device of `like`, from what was given back if it fits.

    Who drops it instead of giving it back loses nothing but its reuse.
    """
    if math.prod(shape) * like.itemsize < SMALL or not like.is_cpu:
        return like.new_empty(shape)
    try:
        return _shelf[shape, like.dtype].pop()
    except (KeyError, IndexError):  # none was given back, or another thread was quicker
        _wanted[shape, like.dtype] += 1
        return like.new_empty(shape)


def give_back(tensors: Iterable[Tensor]) -> None:
    """Takes tensors that nobody will look at again, whole contiguous ones on the CPU; the rest is dropped.

    And no more of a kind than were ever lent: squares that are given back need not have been lent.
    """
    if sys.is_finalizing():
        return  # torch may be gone before the shelf is
    tensors = [tensor for tensor in tensors if tensor.nbytes >= SMALL]
    if not tensors:
        return
    waiting = sum(
        len(row) * math.prod(shape) * dtype.itemsize for (shape, dtype), row in list(_shelf.items())
    )
    for tensor in tensors:
        used, key = tensor.nbytes, (tuple(tensor.shape), tensor.dtype)
        row = _shelf.setdefault(key, [])
        missing = len(row) < _wanted[key] and used <= SHELF - waiting
        if missing and tensor.is_cpu and tensor.is_contiguous() and _is_whole(tensor):
            row.append(tensor)
            waiting += used


@cache
def expect_large_blocks() -> None:
    """Has the C library keep up to 62 MB of freed memory, for the activations and gradients that come and go.

    glibc keeps twice the largest mapped block that was ever freed; before that it gives back, at the end of every
    backward pass, what the next one must fault in again: on a small ResNet a tenth of a step. This frees such a block;
    it is never touched, and costs nothing.
    """
    torch.empty(BRIEF, dtype=torch.uint8)


def _is_whole(tensor: Tensor) -> bool:
    """Whether nothing else lies in its memory, and autograd may write there again."""
    return tensor.untyped_storage().nbytes() == tensor.nbytes and not tensor.is_inference()


atexit.register(_shelf.clear)  # torch must still be whole when its tensors go
