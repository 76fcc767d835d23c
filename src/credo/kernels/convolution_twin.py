"""The pure-torch twin of the convolution kernel: the input is unfolded, so that rᵢ is a matrix product.

few places             Σᵢrᵢ² from pairs of places, one matrix product a tap
few weights            all rᵢ, squared together
else                   some rᵢ at a time, or a part of one, in a tile that stays in the caches until it is squared
"""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from credo.kernels import unfolding
from credo.kernels.convolution_pairs import multiplications, paired_sums
from credo.kernels.scratch import LIMIT, scratch
from credo.kernels.unfolding import (
    Geometry,
    KernelRow,
    accumulators,
    as_weight,
    columns_per_channel,
    columns_per_example,
    grouped,
    kernel_rows,
    line_length,
    unfolded,
)

TILE = 2 << 20  # bytes of rᵢ at a time, for each thread: more leave the caches, fewer cost calls
LARGE_TILE = 4 << 20  # for many threads, and on an accelerator, which likes few large calls
SUMS = LIMIT // 4  # bytes of Σᵢrᵢ, and of Σᵢrᵢ², at a time: twice so many are kept as scratch
SMALL = 1 << 18  # bytes of rᵢ of which several always fit a tile
PASSES = 24  # multiplications that cost what a tile moves through the cache for one element of one rᵢ


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
    if x.dim() == 3:  # one dimension is a row of two
        at = Geometry((1, *kernel_size), (1, *stride), (0, *padding), (1, *dilation), groups)
        total, squares = weight_sums_twin(x.unsqueeze(2), g.unsqueeze(2), *at)
        return total.squeeze(2), squares.squeeze(2)
    shape = weight_shape(x, g, at)
    total, squares = x.new_empty(shape), x.new_empty(shape)
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


class WeightBlock(NamedTuple):
    """A part of the weight that does not depend on the rest."""

    outputs: slice
    channels: slice  # of the weight
    inputs: slice  # channels of the input
    groups: int


def parts(x: Tensor, g: Tensor, at: Geometry) -> Iterator[WeightBlock]:
    """Groups, or slices of the channels, of which one example unfolds to at most COLUMNS bytes; and of the outputs."""
    inside, outside = x.shape[1] // at.groups, g.shape[1] // at.groups
    channel_bytes = columns_per_channel(x, g, at) * x.element_size()
    if at.groups == 1:
        step = max(1, unfolding.COLUMNS // channel_bytes)
        sums = min(step, inside) * outside * at.taps * x.element_size()
        rows = in_even_parts(outside, -(-sums // SUMS), 16)
        for o, c in product(range(0, outside, rows), range(0, inside, step)):
            yield WeightBlock(slice(o, o + rows), slice(c, c + step), slice(c, c + step), 1)
        return
    few = SMALL // (outside * inside * at.taps * x.element_size())
    step = max(1, min(unfolding.COLUMNS // (channel_bytes * inside), few))
    for i in range(0, at.groups, step):
        end = min(i + step, at.groups)
        yield WeightBlock(
            slice(i * outside, end * outside), slice(None), slice(i * inside, end * inside), end - i
        )


def in_even_parts(size: int, number: int, multiple: int) -> int:
    """The size of each of so many parts, about equal, and a multiple of so many."""
    return -(-size // (number * multiple)) * multiple


def strategy(x: Tensor, g: Tensor, at: Geometry, weight: Tensor) -> Strategy:
    """How to compute a part; all other code is the same on every device."""
    small = weight.numel() * x.element_size() < SMALL
    if at.groups > 1 or x.device.type != "cpu" or small:
        return tiled_sums
    return paired_sums if multiplications(x, g, at) <= math.prod(g.shape[2:]) + PASSES else tiled_sums


def tiled_sums(x: Tensor, g: Tensor, at: Geometry, total: Tensor, squares: Tensor) -> None:
    """Unfold some examples; then one row of the kernel after the other."""
    rows, line = kernel_rows(x, g, at), math.prod(g.shape[3:])
    phases = sorted({row.phase for row in rows})
    sums = accumulators((2, at.kernel_size[0], len(total), line_length(x, at)), x)
    step = max(1, unfolding.COLUMNS // (columns_per_example(x, g, at) * x.element_size()))
    for part, grads in zip(torch.split(x, step), torch.split(g, step), strict=True):
        columns, flat_grads = unfolded(part, grads, at, phases), grouped(grads, at.groups)
        factors = []
        for row in rows:
            lines = row.end - row.first
            seen = columns[row.phase].narrow(1, row.start * line, lines * line)
            factors.append((flat_grads.narrow(2, row.first * line, lines * line), seen))
        if no_gaps(rows) and at.groups == 1 and len(part) * sums[0].nbytes <= room(x):
            seeing = slice(rows[0].number, rows[-1].number + 1)
            add_all_rows(factors, sums[0, seeing], sums[1, seeing])
            continue
        for row, (own_grads, seen) in zip(rows, factors, strict=True):
            add_products(own_grads, seen, sums[0, row.number], sums[1, row.number], at.groups)
    for out, own in zip((total, squares), sums, strict=True):
        out.copy_(as_weight(own, out))


def no_gaps(rows: Sequence[KernelRow]) -> bool:
    """Whether some rows of the kernel see anything, and all between them: a stride may take one over the input."""
    return len(rows) > 0 and rows[-1].number - rows[0].number + 1 == len(rows)


def room(like: Tensor) -> int:
    """Bytes of rᵢ at a time, for all threads."""
    return min(TILE * torch.get_num_threads(), LARGE_TILE) if like.is_cpu else LARGE_TILE


def add_all_rows(factors: Sequence[tuple[Tensor, Tensor]], total: Tensor, squares: Tensor) -> None:
    """Adds Σᵢrᵢ and Σᵢrᵢ², both (rows, O, K), where for each row the rᵢ are the products of its factors."""
    shape = (len(factors), len(factors[0][0]), *total.shape[1:])
    own, squared = scratch("side by side", shape, total), scratch("squares side by side", shape, total)
    for (grads, columns), products in zip(factors, own, strict=True):
        torch.bmm(grads, columns, out=products)  # rᵢ
    total.add_(own.sum(1))
    squares.add_(torch.mul(own, own, out=squared).sum(1))


def add_products(grads: Tensor, columns: Tensor, total: Tensor, squares: Tensor, groups: int) -> None:
    """Adds Σᵢrᵢ and Σᵢrᵢ², where rᵢ are the products of (M·groups, O, P) and (M·groups, P, K)."""
    threads = torch.get_num_threads()
    together = room(grads) // total.nbytes
    if together > 1 or groups > 1:
        even = max(
            1, together - together % threads if together > threads else together
        )  # each thread has as many
        add_together(grads, columns, total, squares, even * groups)
        return
    tiles = -(-total.nbytes // room(grads))
    rows = in_even_parts(len(total), tiles, threads)
    for own_grads, *own_sums in zip(
        torch.split(grads, rows, 1), torch.split(total, rows), torch.split(squares, rows), strict=True
    ):
        add_one_by_one(own_grads, columns, *own_sums)


def add_together(grads: Tensor, columns: Tensor, total: Tensor, squares: Tensor, step: int) -> None:
    """Several examples at a time: side by side what the first, second, … of each time add up to, and then all."""
    (some_grads, *more_grads), (some_columns, *more_columns) = (
        torch.split(t, step) for t in (grads, columns)
    )
    shape = (len(some_grads), grads.shape[1], columns.shape[2])
    sums, square_sums = scratch("side by side", shape, total), scratch("squares side by side", shape, total)
    torch.bmm(some_grads, some_columns, out=sums)  # rᵢ
    torch.mul(sums, sums, out=square_sums)
    for some_grads, some_columns in zip(more_grads, more_columns, strict=True):
        n = len(some_grads)
        own = scratch("products", (n, *shape[1:]), total)
        torch.bmm(some_grads, some_columns, out=own)
        (sums if n == len(sums) else sums[:n]).add_(own)
        (square_sums if n == len(sums) else square_sums[:n]).addcmul_(own, own)
    total.add_(sums.view(-1, *total.shape).sum(0))
    squares.add_(square_sums.view(-1, *total.shape).sum(0))


def add_one_by_one(grads: Tensor, columns: Tensor, total: Tensor, squares: Tensor) -> None:
    """One example after the other, for some rows of the weight.

    The rows are multiplied in as many equal parts as there are threads: so each thread squares what it has multiplied,
    and nothing moves from the cache of one core to another's.
    """
    threads = torch.get_num_threads()
    equal = (threads if len(squares) % threads == 0 else 1, -1, squares.shape[-1])
    total, squares = total.view(equal), squares.view(equal)
    own = scratch("products", tuple(squares.shape), squares)
    grads = grads.reshape(len(grads), *own.shape[:2], -1)
    for own_grads, own_columns in zip(grads, columns[:, None].expand(-1, len(own), -1, -1), strict=True):
        torch.bmm(own_grads, own_columns, out=own)  # rᵢ
        total.add_(own)
        squares.addcmul_(own, own)
