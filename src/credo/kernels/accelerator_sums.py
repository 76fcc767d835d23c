"""Sums of per-example gradients on an accelerator, in plain torch: as few and as large calls as the budget allows.

    rᵢ[o, k] = Σₚ gᵢ[o, p] · columns(xᵢ)[k, p]          total = Σᵢ rᵢ        squares = Σᵢ rᵢ²

The unfolded inputs of many examples are one strided copy, their rᵢ one batched product, and both sums one reduction
each. Four calls do what memory allows, and a layer is cut into as many such steps as the budget asks for.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from credo.kernels.accelerator import plain, scratch_bytes
from credo.kernels.convolution_reference import Geometry
from credo.kernels.layout import widened


@plain
def row_sums(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """gᵀx and (g²)ᵀ(x²), both (O, I), Σᵢgᵢ and Σᵢgᵢ², both (O), from x (M, I) and g (M, O)."""
    x, g = widened(x, g)
    squared = g.square()
    return g.T @ x, squared.T @ x.square(), g.sum(0), squared.sum(0)


@plain
def convolution_sums(x: Tensor, g: Tensor, at: Geometry, budget: int | None = None) -> tuple[Tensor, Tensor]:
    """(Σᵢrᵢ, Σᵢrᵢ²), both (C_out, C_in / groups, *kernel_size), from x (M, C_in, *S) and g (M, C_out, *S_out)."""
    x, g = widened(x, g)
    groups, places = at.groups, g.shape[2:]
    outputs, inputs, count = g.shape[1] // groups, x.shape[1] // groups * at.taps, math.prod(places)
    shape = (g.shape[1], x.shape[1] // groups, *at.kernel_size)
    # Columns and rᵢ of one example; its input too where it is padded.
    numbers = groups * (inputs * count * (not _is_plain(at)) + outputs * inputs) + x[:1].numel() * any(
        at.padding
    )
    budget = scratch_bytes() if budget is None else budget
    # Sums so far, and those of one step, are as large as the weight.
    left = max(budget // 4, budget - 4 * groups * outputs * inputs * x.element_size())
    step = _step(len(x), numbers * x.element_size(), left)
    total = squares = None
    for some_x, some_g in zip(x.split(step), g.split(step), strict=True):  # type: ignore[no-untyped-call]
        m = len(some_x)
        seen = columns(some_x, at, places).reshape(m * groups, inputs, count)
        gradients = some_g.reshape(m * groups, outputs, count)
        products = torch.bmm(gradients, seen.mT)
        del seen
        products = products.view(m, groups * outputs, inputs)
        own = products.sum(0)
        own_squares = products.square_().sum(0)
        total = own if total is None else total.add_(own)
        squares = own_squares if squares is None else squares.add_(own_squares)
        del products, own, own_squares, gradients  # before the next ones are made
    assert total is not None
    assert squares is not None
    return total.view(shape), squares.view(shape)


def columns(x: Tensor, at: Geometry, places: torch.Size) -> Tensor:
    """(m, C, *S) as (m, C, taps, places): what each tap sees from each place, a view where there is nothing to copy."""
    if _is_plain(at):
        return x
    pads = [amount for padding in reversed(at.padding) for amount in (padding, padding)]
    x = F.pad(x, pads) if any(pads) else x
    example, channel, *spatial = x.stride()
    taps = [stride * step for stride, step in zip(spatial, at.dilation, strict=True)]
    moves = [stride * step for stride, step in zip(spatial, at.stride, strict=True)]
    return x.as_strided((*x.shape[:2], *at.kernel_size, *places), (example, channel, *taps, *moves))


def _is_plain(at: Geometry) -> bool:
    """Whether the columns are the input itself."""
    return at.taps == 1 and not any(at.padding) and max(at.stride) == 1


def _step(examples: int, each: int, budget: int) -> int:
    """How many examples at a time: as many as fit, in steps of about the same size."""
    most = min(examples, max(1, budget // max(each, 1)))
    return -(-examples // -(-examples // most)) if examples else 1


@plain
def batch_norm_backward(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    training: bool,
    need_input: bool,
) -> tuple[Tensor | None, Tensor, Tensor, Tensor, Tensor]:
    """(gx or None, Σaᵢ, Σaᵢ², Σbᵢ, Σbᵢ²) as `normalisation.batch_norm_backward_reference`, in passes as few as can be.

    With Σₚ over positions: aᵢ = invstd·(Σₚ x·g − mean·bᵢ) and bᵢ = Σₚ g would cancel where the mean is large, so x is
    centred first, which is one pass more.
    """
    along, places = (-1, *[1] * (x.dim() - 2)), tuple(range(2, x.dim()))
    centred = x - mean.view(along)
    if places:
        a, b = (centred * g).sum(places), g.sum(places)
    else:
        a, b = centred * g, g
    both = torch.stack((a * invstd, b))  # (2, M, C)
    (sum_a, sum_b), (squares_a, squares_b) = both.sum(1).unbind(), both.square().sum(1).unbind()
    gx = None
    if need_input and training and x.numel():
        del centred
        gx = torch.ops.aten.native_batch_norm_backward(
            g, x, weight, None, None, mean, invstd, True, 0.0, [True, False, False]
        )[0]
    elif need_input:
        scale = invstd if weight is None else invstd * weight
        gx = g * scale.view(along)
    return gx, sum_a, squares_a, sum_b, squares_b
