"""How tensors lie in memory, and the types that sums are made in."""

from itertools import pairwise

import torch
from torch import Tensor

NARROW = (
    16  # numbers: torch makes the softmax of shorter rows one by one, of columns a vector of them at a time
)


def widened(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Both in one type, float32 at least: a sum of squares overflows or loses digits in half precision."""
    if x.dtype is g.dtype and x.dtype in (torch.float32, torch.float64):
        return x.detach(), g.detach()
    dtype = torch.promote_types(torch.promote_types(x.dtype, g.dtype), torch.float32)
    return x.detach().to(dtype), g.detach().to(dtype)


def readable(t: Tensor) -> Tensor:
    """`t` (M, C, *S) itself where a kernel can walk through it, channels first or last; else a contiguous copy."""
    _, channel, place = flat_strides(t)
    return t if place == 1 or (channel == 1 and place > 0) else t.contiguous()


def flat_strides(t: Tensor) -> tuple[int, int, int]:
    """Elements from one example, channel and place to the next; place is 0 when places do not follow one another."""
    dims = [(size, stride) for size, stride in zip(t.shape[2:], t.stride()[2:], strict=True) if size != 1]
    for (_, outer), (size, inner) in pairwise(dims):
        if outer != size * inner:
            return t.stride(0), t.stride(1), 0
    return t.stride(0), t.stride(1), dims[-1][1] if dims else 1
