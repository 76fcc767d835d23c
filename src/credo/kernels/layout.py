"""How tensors lie in memory, and the types that sums are made in."""

import torch
from torch import Tensor


def widened(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Both in one type, float32 at least: a sum of squares overflows or loses digits in half precision."""
    dtype = torch.promote_types(torch.promote_types(x.dtype, g.dtype), torch.float32)
    return x.detach().to(dtype), g.detach().to(dtype)


def readable(t: Tensor) -> Tensor:
    """`t` (M, C, *S) itself where a kernel can walk through it, channels first or last; else a contiguous copy."""
    _, channel, place = flat_strides(t)
    return t if place == 1 or (channel == 1 and place > 0) else t.contiguous()


def flat_strides(t: Tensor) -> tuple[int, int, int]:
    """Elements from one example, channel and place to the next; place is 0 when places do not follow one another."""
    place, expected = 0, 0
    for size, stride in zip(reversed(t.shape[2:]), reversed(t.stride()[2:]), strict=True):
        if size == 1:
            continue
        if expected not in (0, stride):
            return t.stride(0), t.stride(1), 0
        place = place or stride
        expected = stride * size
    return t.stride(0), t.stride(1), place or 1
