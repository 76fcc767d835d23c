"""Memory that is kept between calls: scratch, one set of buffers per Python thread, and what the C library keeps.

torch's CPU allocator gives memory back to the system at once, and touching fresh pages costs more than many kernels
do: without reuse the pure-torch path takes half as long again on a small network.
"""

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Hashable
from functools import cache
from typing import Any, final

import torch
from torch import Tensor

LIMIT = 24 << 20  # bytes that all the buffers of one kernel may have together
OWNED = 12 << 20  # bytes of scratch with one owner each, all together
PATIENCE = 1000  # times that an owner is refused scratch before others lose theirs
VIEWS = 512  # of buffers, in the shapes that were asked for; making one takes longer than many an operation
LARGE = 1 << 20  # bytes of a tensor whose place in memory is worth using again
SPARE = 128  # bytes, more than glibc needs to align a block
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # as malloc.h numbers them
LARGEST_KEPT, MOST_KEPT = (
    32 << 20,
    1 << 30,
)  # bytes of one freed block, the most that glibc allows, and of all

_kept = threading.local()


@final
class Addresses(threading.local):
    """Where scratch lies that kernels use without a tensor; ask `known` first, by name, type and size."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, torch.dtype, int], int] = {}

    def make(self, name: str, size: int, like: Tensor) -> int:
        """The address of `size` elements on the CPU; what was there for less may move."""
        if len(self.known) >= VIEWS:
            self.known.clear()
        address = self.known[name, like.dtype, size] = scratch(name, (size,), like).data_ptr()
        return address


addresses = Addresses()


def workspace(name: str, size: int, like: Tensor) -> int:
    """The address of `size` elements of scratch on the CPU, for kernels that need no tensor."""
    return addresses.known.get((name, like.dtype, size)) or addresses.make(name, size, like)


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


@final
class Owned(threading.local):
    """Scratch on the CPU that its owner shares with nobody, as views of one tensor; ask `views` for it first.

    What another layer wrote to common scratch would have to come from the other core's cache.
    """

    def __init__(self) -> None:
        self.views: dict[Hashable, tuple[Tensor, ...]] = {}
        self._refused = 0

    def make(
        self, owner: Hashable, nbytes: int, make: Callable[[], tuple[Tensor, ...]]
    ) -> tuple[Tensor, ...] | None:
        """For an owner that has none; None where there is no room. At times all lose theirs: some may be gone."""
        if nbytes + sum(views[0].untyped_storage().nbytes() for views in self.views.values()) > OWNED:
            self._refused += 1
            if self._refused % PATIENCE:
                return None
            self.views.clear()
        with torch.inference_mode(False):  # as in `_new_view`
            self.views[owner] = make()
        return self.views[owner]


owned = Owned()


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
    known: tuple[dict[Any, Any], ...] = (_kept.__dict__["views"], addresses.known)
    for table in known:
        for key in [key for key in table if key[:2] == (name, dtype)]:
            del table[key]


def spacious(x: Tensor) -> Tensor:
    """`empty_like` with a few bytes to spare, for large results that are soon dropped: the next may then lie there.

    To align a block glibc wants some hundred bytes more than it hands out, and the rest is soon in use. So what was
    freed does not fit the next tensor of that size, and the memory of a ResNet was full of such holes.
    """
    return x.new_empty(x.numel() + SPARE // x.itemsize).as_strided_(x.shape, x.stride())


def is_worth_space(x: Tensor) -> bool:
    """For which `spacious` is: large ones on the CPU without gaps, whose channels come first or last."""
    dense = x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last)
    return x.nbytes >= LARGE and x.is_cpu and dense


@cache
def expect_large_blocks() -> None:
    """Has the C library keep up to 1 GB of freed memory, for the activations and gradients that come and go.

    glibc gives back, at the end of every backward pass, what the next one must fault in again: a tenth of a step on
    a small ResNet, a fortieth on a large one. Blocks of more than 32 MB still come and go by themselves. Thresholds
    that are set in the environment stay.
    """
    asked = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"} & set(os.environ)
    if sys.platform != "linux" or asked or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "gnu_get_libc_version"):
        library.mallopt(MMAP_THRESHOLD, LARGEST_KEPT)
        library.mallopt(TRIM_THRESHOLD, MOST_KEPT)
