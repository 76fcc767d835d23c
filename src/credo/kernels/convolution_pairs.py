"""Σᵢrᵢ² of a convolution from pairs of places, for maps so small that there are few:

    Σᵢ (Σₚ gᵢₚ xᵢₚ)² = Σ_{p≤q} (2 if p<q) · Σᵢ gᵢₚgᵢ_q · xᵢₚxᵢ_q

which is one matrix product a tap, over examples and pairs. On such maps a tap sees mostly padding; only the places from
which it sees the input take part: of a 3×3 kernel on 2×2 maps 26 pairs, not 90.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod

import torch
from torch import Tensor

from credo.kernels import unfolding
from credo.kernels.unfolding import Geometry, accumulators

GATHERING = 44  # multiplications that cost what it takes to gather one number of a pair

View = list[
    tuple[int, int]
]  # along one dimension: places in the output, and the place that a tap sees from there


def views(x: Tensor, g: Tensor, at: Geometry) -> Iterator[tuple[View, ...]]:
    """For each tap, one dimension after the other, where it sees the input and not the padding."""
    lines = []
    for size, places, kernel, stride, padding, dilation in zip(
        x.shape[2:], g.shape[2:], *at[:4], strict=True
    ):
        starts = [k * dilation - padding for k in range(kernel)]
        lines.append(
            [
                [(p, start + p * stride) for p in range(places) if 0 <= start + p * stride < size]
                for start in starts
            ]
        )
    return product(*lines)


def multiplications(x: Tensor, g: Tensor, at: Geometry) -> float:
    """What `paired_sums` costs, for each element of the weight and each example."""
    counts = [prod(map(len, view)) for view in views(x, g, at)]
    rows = sum(counts) + sum(n * (n + 1) // 2 for n in counts)
    return rows * (1 + GATHERING * (1 / x.shape[1] + 1 / g.shape[1])) / at.taps


def paired_sums(x: Tensor, g: Tensor, at: Geometry, total: Tensor, squares: Tensor) -> None:
    """Fills (Σᵢrᵢ, Σᵢrᵢ²), tap by tap."""
    taps = [indices(view, x, g) for view in views(x, g, at)]
    most = max(len(outs) for outs, _ in taps)
    step = unfolding.COLUMNS // max(1, most * (most + 1) * (x.shape[1] + g.shape[1]) * x.element_size())
    sums = accumulators((2, at.taps, *total.shape[:2]), x)
    for part, grads in zip(torch.split(x, max(1, step)), torch.split(g, max(1, step)), strict=True):
        xs, gs = (t.flatten(2).permute(2, 0, 1).contiguous() for t in (part, grads))  # (places, m, channels)
        for (outs, ins), tap_total, tap_squares in zip(taps, *sums, strict=True):
            add_tap(xs.index_select(0, ins), gs.index_select(0, outs), tap_total, tap_squares)
    sums[1].clamp_(min=0)  # a sum of squares, but for rounding
    for out, own in zip((total, squares), sums, strict=True):
        out.copy_(own.view(*at.kernel_size, *own.shape[1:]).movedim((-2, -1), (0, 1)))


def add_tap(x: Tensor, g: Tensor, total: Tensor, squares: Tensor) -> None:
    """Adds one tap's share, from what it sees (n, m, C) and the gradient there (n, m, O)."""
    total.addmm_(g.flatten(0, 1).T, x.flatten(0, 1))
    p, q = torch.triu_indices(len(x), len(x), device=x.device)
    both_x, both_g = (t.index_select(0, p).mul_(t.index_select(0, q)) for t in (x, g))
    both_g.mul_((1 + (p < q)).to(x.dtype).view(-1, 1, 1))
    squares.addmm_(both_g.flatten(0, 1).T, both_x.flatten(0, 1))


def indices(view: Sequence[View], x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """The places in the output and in the input of one tap's view, as if there were one dimension only."""
    outs, ins = [0], [0]
    for line, size, places in zip(view, x.shape[2:], g.shape[2:], strict=True):
        outs = [o * places + p for o in outs for p, _ in line]
        ins = [i * size + s for i in ins for _, s in line]
    return tuple(torch.tensor(own, dtype=torch.int64, device=x.device) for own in (outs, ins))  # type: ignore[return-value]
