"""The input of a convolution as matrices: what each tap of the kernel sees from each place of the output."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from credo.kernels.scratch import LIMIT, scratch

COLUMNS = 8 << 20  # bytes of unfolded input at a time
FEW_CHANNELS = 8  # fewer than these are not worth copying as rows: they stay outside, places inside


class Geometry(NamedTuple):
    """How the kernel moves, one number a dimension."""

    kernel_size: Sequence[int]
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int

    @property
    def taps(self) -> int:
        return math.prod(self.kernel_size)


def unfolded(x: Tensor, g: Tensor, at: Geometry, elements: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Some examples at a time, `elements` of scratch for each: columns (m·groups, P, K) and g (m, O, P).

    K counts taps and the channels of a group, channels inside; with few channels taps inside, see `as_weight`.
    """
    step = max(1, COLUMNS // (elements * x.element_size()))
    unfold = channels_inside if are_inside(x.shape[1] // at.groups) else places_inside
    for part, grads in zip(torch.split(x, step), torch.split(g, step), strict=True):
        yield unfold(part, g.shape[2:], at), grads.flatten(2)


def are_inside(channels: int) -> bool:
    """Whether the channels of a group are the innermost dimension; matrix products like that best."""
    return channels >= FEW_CHANNELS


def channels_inside(x: Tensor, places: Sequence[int], at: Geometry) -> Tensor:
    """(m·groups, P, taps·C)."""
    channels = x.shape[1] // at.groups
    columns = scratch("columns", (len(x), at.groups, *places, *at.kernel_size, channels), x)
    padded = F.pad(x.movedim(1, -1), (0, 0, *both_sides(at.padding))).contiguous()
    seen = windows(padded, 1, places, at)
    columns.copy_(seen.view(*seen.shape[:-1], at.groups, channels).movedim(-2, 1))
    return columns.view(len(x) * at.groups, math.prod(places), at.taps * channels)


def places_inside(x: Tensor, places: Sequence[int], at: Geometry) -> Tensor:
    """(m·groups, P, C·taps), transposed in memory."""
    columns = scratch("columns", (len(x), x.shape[1], *at.kernel_size, *places), x)
    columns.copy_(windows(F.pad(x.contiguous(), both_sides(at.padding)), 2, places, at))
    return columns.view(len(x) * at.groups, -1, math.prod(places)).mT


def windows(padded: Tensor, first: int, places: Sequence[int], at: Geometry) -> Tensor:
    """A strided view: (M, C, *kernel, *places) when spatial dimensions begin at 2, (M, *places, *kernel, C) at 1."""
    spatial = padded.stride()[first : first + len(places)]
    taps = [stride * dilation for stride, dilation in zip(spatial, at.dilation, strict=True)]
    steps = [stride * move for stride, move in zip(spatial, at.stride, strict=True)]
    if first == 2:
        shape, strides = (*at.kernel_size, *places), (*taps, *steps)
        return padded.as_strided((*padded.shape[:2], *shape), (*padded.stride()[:2], *strides))
    shape, strides = (*places, *at.kernel_size), (*steps, *taps)
    return padded.as_strided(
        (len(padded), *shape, padded.shape[-1]), (padded.stride(0), *strides, padded.stride(-1))
    )


def as_weight(sums: Tensor, weight: Tensor) -> Tensor:
    """A view of (O, K) with the dimensions of the weight, (O, C, *kernel)."""
    if not are_inside(weight.shape[1]):
        return sums.view(weight.shape)
    return sums.view(len(weight), *weight.shape[2:], weight.shape[1]).movedim(-1, 1)


def accumulators(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Zeros to add to; of a very large weight they are not kept."""
    if math.prod(shape) * like.element_size() > LIMIT // 2:
        return like.new_zeros(shape)
    return scratch("sums", shape, like).zero_()


def both_sides(padding: Sequence[int]) -> tuple[int, ...]:
    """As F.pad wants it: from the last dimension to the first, before and after."""
    return tuple(p for size in reversed(padding) for p in (size, size))
