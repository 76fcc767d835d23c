"""The pure-torch twin of the convolution kernel: the input is unfolded, so that rᵢ is a matrix product.

a few places, P ≤ 4    Σᵢrᵢ² = Σ_{p≤q} (2 if p<q) · (g_p∘g_q)ᵀ(x_p∘x_q)    one product over examples and pairs
small weights          some rᵢ at once with one bmm, then two reductions; on an accelerator always
else                   one rᵢ after the other, in tiles that stay in the L2 cache
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from credo.kernels.scratch import scratch

COLUMNS = 8 << 20  # bytes of unfolded input at a time
PRODUCTS = 2 << 20  # bytes of rᵢ at a time in a batch
TILE = 1 << 19  # bytes of rᵢ at a time in a loop: three of these fit the L2 cache
FEW_PLACES = 4  # up to here ten pairs of places cost less than what the loop moves through the cache
MANY_PLACES = 32  # from here on adding rᵢ to the total costs less than torch's own weight gradient


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


def weight_sums_twin(
    x: Tensor,
    g: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> tuple[Tensor, Tensor]:
    """(Σᵢrᵢ, Σᵢrᵢ²) as from the C++ kernel."""
    at = Geometry(kernel_size, stride, padding, dilation, groups)
    total, squares = empty_sums(x, g, at)
    for part in parts(x, g, at):
        own = x[:, part.inputs], g[:, part.outputs], at._replace(groups=part.groups)
        weight = total[part.outputs, part.channels]
        strategy(*own, weight)(*own, weight, squares[part.outputs, part.channels])
    return total, squares


def empty_sums(x: Tensor, g: Tensor, at: Geometry) -> tuple[Tensor, Tensor]:
    """The outputs, filled with zeros."""
    shape = (g.shape[1], x.shape[1] // at.groups, *at.kernel_size)
    return x.new_zeros(shape), x.new_zeros(shape)


Strategy = Callable[[Tensor, Tensor, Geometry, Tensor, Tensor], None]


class Part(NamedTuple):
    """A part of the weight that does not depend on the rest."""

    outputs: slice
    channels: slice  # of the weight
    inputs: slice  # channels of the input
    groups: int


def parts(x: Tensor, g: Tensor, at: Geometry) -> Iterator[Part]:
    """Groups, or slices of the channels, of which one example unfolds to at most COLUMNS bytes."""
    inside, outside = x.shape[1] // at.groups, g.shape[1] // at.groups
    channel_bytes = at.taps * math.prod(g.shape[2:]) * x.element_size()
    if at.groups == 1:
        step = max(1, COLUMNS // channel_bytes)
        yield from (
            Part(slice(None), slice(c, c + step), slice(c, c + step), 1) for c in range(0, inside, step)
        )
        return
    step = max(1, min(COLUMNS // (channel_bytes * inside), PRODUCTS // (outside * inside * at.taps * 64)))
    for i in range(0, at.groups, step):
        end = min(i + step, at.groups)
        yield Part(slice(i * outside, end * outside), slice(None), slice(i * inside, end * inside), end - i)


def strategy(x: Tensor, g: Tensor, at: Geometry, weight: Tensor) -> Strategy:
    """How to compute a part; all other code is the same on every device."""
    if at.groups > 1 or x.device.type != "cpu":
        return batched_sums
    if weight.numel() * x.element_size() * 8 < PRODUCTS:
        return batched_sums
    return paired_sums if math.prod(g.shape[2:]) <= FEW_PLACES else looped_sums


def batched_sums(x: Tensor, g: Tensor, at: Geometry, total: Tensor, squares: Tensor) -> None:
    """Unfold some examples, multiply them in one bmm, reduce twice."""
    places, inside = math.prod(g.shape[2:]), total[0].numel()
    step = max(
        1, min(COLUMNS // (x.shape[1] * at.taps * places), PRODUCTS // total.numel()) // x.element_size()
    )
    for part, grads in zip(torch.split(x, step), torch.split(g, step), strict=True):
        columns = scratch("columns", (len(part), x.shape[1], *at.kernel_size, *g.shape[2:]), x)
        padded = F.pad(part.contiguous(), both_sides(at.padding))
        columns.copy_(windows(padded, 2, g.shape[2:], at))
        own = scratch("products", (len(part) * at.groups, len(total) // at.groups, inside), x)
        rows = grads.reshape(len(own), -1, places)
        torch.bmm(rows, columns.view(len(own), inside, places).mT, out=own)  # rᵢ
        own = own.view(len(part), *total.shape)
        total.add_(own.sum(0))
        squares.add_(own.square_().sum(0))


def looped_sums(x: Tensor, g: Tensor, at: Geometry, total: Tensor, squares: Tensor) -> None:
    """Unfold some examples; then one example and one tile of the weight at a time."""
    places, inside = math.prod(g.shape[2:]), x.shape[1] * at.taps
    rows = max(1, TILE // (inside * x.element_size()))
    adds = places >= MANY_PLACES
    sums = x.new_zeros(2, len(total), inside)  # taps before channels
    for columns, grads in unfolded(x, g, at, inside * places):
        for tile_grads, tile_total, tile_squares in zip(
            torch.split(grads, rows, 1), *(torch.split(s, rows) for s in sums), strict=True
        ):
            tile = scratch("products", tuple(tile_total.shape), x)
            for own_grads, own_columns in zip(tile_grads, columns, strict=True):
                torch.mm(own_grads, own_columns, out=tile)  # rᵢ
                if adds:
                    tile_total.add_(tile)
                tile_squares.addcmul_(tile, tile)
    total.copy_(taps_last(sums[0], total) if adds else torch_gradient(x, g, at, total))
    squares.copy_(taps_last(sums[1], squares))


def paired_sums(x: Tensor, g: Tensor, at: Geometry, total: Tensor, squares: Tensor) -> None:
    """(Σₚ g_p x_p)² = Σ_{p≤q} (2 if p<q) g_p g_q x_p x_q: matrix products over examples and pairs of places."""
    places, inside = math.prod(g.shape[2:]), x.shape[1] * at.taps
    pairs = places * (places + 1) // 2
    sums = x.new_zeros(2, len(total), inside)  # taps before channels
    for columns, grads in unfolded(x, g, at, inside * pairs):
        sums[0].addmm_(grads.transpose(0, 1).flatten(1), columns.flatten(0, 1))
        both_columns = scratch("pairs", (len(columns), pairs, inside), x)
        both_grads = x.new_empty(len(columns), pairs, len(total))
        start = 0
        for p in range(places):
            end = start + places - p
            torch.mul(columns[:, p : p + 1], columns[:, p:], out=both_columns[:, start:end])
            torch.mul(grads[:, :, p : p + 1].mT, grads[:, :, p:].mT, out=both_grads[:, start:end])
            both_grads[:, start + 1 : end] *= 2
            start = end
        sums[1].addmm_(both_grads.flatten(0, 1).T, both_columns.flatten(0, 1))
    total.copy_(taps_last(sums[0], total))
    squares.copy_(taps_last(sums[1].clamp_(min=0), squares))  # a sum of squares, but for rounding


def unfolded(x: Tensor, g: Tensor, at: Geometry, elements: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Some examples at a time, `elements` of scratch for each: columns (m, P, taps·C) and g (m, O, P)."""
    step = max(1, COLUMNS // (elements * x.element_size()))
    for part, grads in zip(torch.split(x, step), torch.split(g, step), strict=True):
        columns = scratch("columns", (len(part), *g.shape[2:], *at.kernel_size, x.shape[1]), x)
        padded = F.pad(part.movedim(1, -1), (0, 0, *both_sides(at.padding))).contiguous()
        columns.copy_(windows(padded, 1, g.shape[2:], at))
        yield columns.view(len(part), -1, at.taps * x.shape[1]), grads.flatten(2)


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


def taps_last(sums: Tensor, weight: Tensor) -> Tensor:
    """(O, taps·C) with the dimensions of the weight."""
    return sums.view(len(weight), *weight.shape[2:], weight.shape[1]).movedim(-1, 1)


def torch_gradient(x: Tensor, g: Tensor, at: Geometry, weight: Tensor) -> Tensor:
    """Σᵢrᵢ from torch itself."""
    gradient: Tensor = torch.ops.aten.convolution_backward(
        g,
        x,
        weight,
        None,
        at.stride,
        at.padding,
        at.dilation,
        False,
        [0] * len(at.stride),
        1,
        [False, True, False],
    )[1]
    return gradient


def both_sides(padding: Sequence[int]) -> tuple[int, ...]:
    """As F.pad wants it: from the last dimension to the first, before and after."""
    return tuple(p for size in reversed(padding) for p in (size, size))
