"""The pure-torch twin of the convolution kernel: the input is unfolded, so that rᵢ is a matrix product.

few places             Σᵢrᵢ² from pairs of places, one matrix product a tap
small weights          some rᵢ at once with one bmm, then two reductions; on an accelerator always
else                   one rᵢ after the other, in tiles that stay in the L2 cache
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from credo.kernels import unfolding
from credo.kernels.convolution_pairs import multiplications, paired_sums
from credo.kernels.scratch import lend, scratch
from credo.kernels.unfolding import Geometry, accumulators, as_weight, unfolded

PRODUCTS = 2 << 20  # bytes of rᵢ at a time in a batch
TILE = 1 << 19  # bytes of rᵢ at a time in a loop, for each thread: three of these fit the L2 cache
PASSES = 24  # multiplications that cost what the loop moves through the cache for one element of one rᵢ
MANY_PLACES = 32  # from here on adding rᵢ to the total costs less than torch's own weight gradient


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
    shape = weight_shape(x, g, at)
    total, squares = x.new_empty(shape), lend(shape, x)
    for part in parts(x, g, at):
        own = x[:, part.inputs], g[:, part.outputs], at._replace(groups=part.groups)
        weight = total[part.outputs, part.channels]
        strategy(*own, weight)(*own, weight, squares[part.outputs, part.channels])
    return total, squares


def weight_shape(x: Tensor, g: Tensor, at: Geometry) -> tuple[int, ...]:
    return (g.shape[1], x.shape[1] // at.groups, *at.kernel_size)


def empty_sums(x: Tensor, g: Tensor, at: Geometry) -> tuple[Tensor, Tensor]:
    """The outputs, filled with zeros."""
    shape = weight_shape(x, g, at)
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
        step = max(1, unfolding.COLUMNS // channel_bytes)
        yield from (
            Part(slice(None), slice(c, c + step), slice(c, c + step), 1) for c in range(0, inside, step)
        )
        return
    step = max(
        1, min(unfolding.COLUMNS // (channel_bytes * inside), PRODUCTS // (outside * inside * at.taps * 64))
    )
    for i in range(0, at.groups, step):
        end = min(i + step, at.groups)
        yield Part(slice(i * outside, end * outside), slice(None), slice(i * inside, end * inside), end - i)


def strategy(x: Tensor, g: Tensor, at: Geometry, weight: Tensor) -> Strategy:
    """How to compute a part; all other code is the same on every device."""
    if at.groups > 1 or x.device.type != "cpu" or weight.numel() * x.element_size() * 8 < PRODUCTS:
        return batched_sums
    places = math.prod(g.shape[2:])
    return paired_sums if multiplications(x, g, at) <= places + PASSES else looped_sums


def batched_sums(x: Tensor, g: Tensor, at: Geometry, total: Tensor, squares: Tensor) -> None:
    """Unfold some examples, multiply them in one bmm, reduce twice."""
    places, inside = math.prod(g.shape[2:]), total[0].numel()
    sums = accumulators((2, len(total), inside), x)
    elements = max(x.shape[1] * at.taps * places, unfolding.COLUMNS // PRODUCTS * total.numel())
    for columns, grads in unfolded(x, g, at, elements):
        own = scratch("products", (len(columns), len(total) // at.groups, inside), x)
        torch.bmm(grads.reshape(len(columns), -1, places), columns, out=own)  # rᵢ
        own = own.view(-1, len(total), inside)
        sums[0].add_(own.sum(0))
        sums[1].add_(own.square_().sum(0))
    total.copy_(as_weight(sums[0], total))
    squares.copy_(as_weight(sums[1], squares))


def looped_sums(x: Tensor, g: Tensor, at: Geometry, total: Tensor, squares: Tensor) -> None:
    """Unfold some examples; then one example and one tile of the weight at a time."""
    places, inside = math.prod(g.shape[2:]), x.shape[1] * at.taps
    rows = max(1, TILE // (inside * x.element_size())) * torch.get_num_threads()
    adds = places >= MANY_PLACES
    sums = accumulators((1 + adds, len(total), inside), x)
    for columns, grads in unfolded(x, g, at, inside * places):
        for tile_grads, *tile_sums in zip(
            torch.split(grads, rows, 1), *(torch.split(s, rows) for s in sums), strict=True
        ):
            add_tile(columns, tile_grads, *tile_sums)
    total.copy_(as_weight(sums[1], total) if adds else torch_gradient(x, g, at, total))
    squares.copy_(as_weight(sums[0], squares))


def add_tile(columns: Tensor, grads: Tensor, squares: Tensor, total: Tensor | None = None) -> None:
    """Adds the examples' own rᵢ, and rᵢ², for some rows of the weight.

    The rows are multiplied in as many equal parts as there are threads: so each thread squares what it has multiplied,
    and nothing moves from the cache of one core to another's.
    """
    threads = torch.get_num_threads()
    equal = (threads if len(squares) % threads == 0 else 1, -1)
    squares = squares.view(*equal, squares.shape[-1])
    total = None if total is None else total.view(squares.shape)
    own = scratch("products", tuple(squares.shape), squares)
    grads = grads.reshape(len(grads), *own.shape[:2], -1)
    for own_grads, own_columns in zip(grads, columns[:, None].expand(-1, len(own), -1, -1), strict=True):
        torch.bmm(own_grads, own_columns, out=own)  # rᵢ
        if total is not None:
            total.add_(own)
        squares.addcmul_(own, own)


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
