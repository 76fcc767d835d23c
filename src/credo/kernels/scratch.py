"""Scratch memory that is kept between calls, one set of buffers per Python thread.

torch's CPU allocator gives memory back to the system at once, and touching fresh pages costs more than many kernels
do: without reuse the pure-torch path takes half as long again on a small network.
"""

import threading

import torch
from torch import Tensor

LIMIT = 24 << 20  # bytes that all the buffers of one kernel may have together

_kept = threading.local()


def scratch(name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """An uninitialised tensor of `shape` with the type and device of `like`; the next call of that `name` reuses it."""
    if like.device.type != "cpu":
        return like.new_empty(
            shape
        )  # other devices' allocators keep memory themselves, and know about streams
    buffers: dict[tuple[str, torch.dtype], Tensor] = _kept.__dict__.setdefault("buffers", {})
    size = torch.Size(shape).numel()
    buffer = buffers.get((name, like.dtype))
    if buffer is None or buffer.numel() < size:
        with torch.inference_mode(
            False
        ):  # else it would be an inference tensor, of no use to a later backward
            buffer = buffers[name, like.dtype] = torch.empty(size, dtype=like.dtype)
    return buffer[:size].view(shape)
