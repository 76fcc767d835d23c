"""The convolution kernel in plain torch: each rᵢ is the matrix product of gᵢ and the unfolded input of example i.

Some examples are unfolded at a time, and some rᵢ are in memory at a time: all memory is bounded scratch.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from credo.kernels.scratch import scratch

COLUMNS = 8 << 20  # bytes of unfolded input at a time
PRODUCTS = 1 << 20
LINE = 16  # numbers: matrix products with shorter lines, or with odd ones, are slow


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


def empty_sums(x: Tensor, g: Tensor, at: Geometry) -> tuple[Tensor, Tensor]:
    """The outputs, filled with zeros."""
    shape = (g.shape[1], x.shape[1] // at.groups, *at.kernel_size)
    return x.new_zeros(shape), x.new_zeros(shape)


def weight_sums_reference(x: Tensor, g: Tensor, at: Geometry) -> tuple[Tensor, Tensor]:
    """(Σᵢrᵢ, Σᵢrᵢ²) as from the C++ kernel."""
    sums = empty_sums(x, g, at)
    inside = x.shape[1] // at.groups
    weights = [own.view(at.groups, -1, inside, at.taps) for own in sums]
    grads = g.reshape(len(g), at.groups, g.shape[1] // at.groups, -1)  # (M, G, O, P)
    place = grads.shape[3] * x.element_size()
    channels = max(1, min(inside, COLUMNS // (place * at.taps)))  # of each group
    line = place * padded_line(channels * at.taps)
    groups = max(1, min(at.groups, COLUMNS // line))
    examples = max(1, COLUMNS // (line * groups))
    for own_x, own_grads in zip(torch.split(x, examples), torch.split(grads, examples), strict=True):
        by_group = own_x.reshape(len(own_x), at.groups, inside, *x.shape[2:])
        for i, c in product(range(0, at.groups, groups), range(0, inside, channels)):
            some, seen = slice(i, i + groups), slice(c, c + channels)
            columns = unfolded(by_group[:, some, seen], g.shape[2:], at)
            total, squares = (own[some, :, seen].flatten(2) for own in weights)
            add_products(own_grads[:, some], columns, total, squares)
    return sums


def unfolded(x: Tensor, places: Sequence[int], at: Geometry) -> Tensor:
    """(M, G, C, *S) as (M, G, K, P): what each of the K weights of an output sees from each place of the output."""
    padded = F.pad(x, [side for padding in reversed(at.padding) for side in (padding, padding)])
    spatial = padded.stride()[3:]
    moves = [stride * step for stride, step in zip(spatial, at.stride, strict=True)]
    taps = [stride * step for stride, step in zip(spatial, at.dilation, strict=True)]
    shape = (*x.shape[:3], *at.kernel_size, *places)
    seen = padded.as_strided(shape, (*padded.stride()[:3], *taps, *moves))
    columns = scratch("columns", (*x.shape[:2], padded_line(x.shape[2] * at.taps), math.prod(places)), x)
    inside = columns[:, :, : x.shape[2] * at.taps]  # what the others hold is multiplied, and not read
    inside.view(shape).copy_(seen)
    return columns


def padded_line(length: int) -> int:
    return -(-length // LINE) * LINE


def add_products(grads: Tensor, columns: Tensor, total: Tensor, squares: Tensor) -> None:
    """Adds Σᵢrᵢ and Σᵢrᵢ², where rᵢ are the products of (M, G, O, P) and (M, G, K, P)."""
    for some, rows in tiles(grads, columns):
        own_grads, own_columns = grads[some, :, rows], columns[some]
        shape = (*own_grads.shape[:3], columns.shape[2])
        products = scratch("products", shape, total)
        left, right = own_grads.flatten(0, 1), own_columns.flatten(0, 1).mT
        torch.bmm(left, right, out=products.view(-1, *shape[2:]))
        used = products[..., : total.shape[2]]
        if len(used) == 1:  # a large weight: two passes over it, not five
            total[:, rows].add_(used[0])
            squares[:, rows].addcmul_(used[0], used[0])
        else:
            total[:, rows] += used.sum(0)
            squares[:, rows] += used.square_().sum(0)


def tiles(grads: Tensor, columns: Tensor) -> Iterator[tuple[slice, slice]]:
    """Examples and outputs whose products fit PRODUCTS: all outputs of some examples, or some of one."""
    examples, groups, outputs = grads.shape[:3]
    line = groups * columns.shape[2] * columns.element_size()
    rows = max(1, min(outputs, PRODUCTS // line))
    step = max(1, PRODUCTS // (line * rows)) if rows == outputs else 1
    for i in range(0, examples, step):
        for o in range(0, outputs, rows):
            yield slice(i, i + step), slice(o, o + rows)
