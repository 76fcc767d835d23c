"""Kronecker factors of a layer: Σᵢ vec(rᵢ)vec(rᵢ)ᵀ ≈ A ⊗ G, from its inputs a and its output gradients g.

With t over the T positions of one example (tokens, or places of a convolution's kernel):

    expand   A = Σᵢ Σₜ aᵢₜ aᵢₜᵀ          G = Σᵢ (1/T) Σₜ gᵢₜ gᵢₜᵀ        positions as if independent (KFC)
    reduce   A = Σᵢ āᵢ āᵢᵀ, āᵢ = mean aᵢₜ  G = Σᵢ ĝᵢ ĝᵢᵀ, ĝᵢ = Σₜ gᵢₜ      positions as one average

For T = 1 both are the same, and exact for one example. The bias is a 1 appended to a. A convolution with
groups is a layer for each group, so its factors are stacks (groups, ·, ·).
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from credo.curvature.rule import CHUNK_BYTES, Factors

SHARINGS = ("expand", "reduce")
_PANELS = 4  # how a symmetric product is cut: 10 of 16 blocks are computed, the others mirrored
_WORTH_CUTTING = 128


def row_factors(x: Tensor, g: Tensor, biased: bool, sharing: str) -> Factors:
    """Of a linear layer: x (M, I) or (M, T, I), g likewise."""
    if x.dim() == 2:
        return second_moment(x.T, biased), second_moment(g.T, False)
    if sharing == "reduce":
        return second_moment(x.mean(1).T, biased), second_moment(g.sum(1).T, False)
    positions = max(x.shape[1], 1)
    return second_moment(x.flatten(0, 1).T, biased), second_moment(g.flatten(0, 1).T, False) / positions


def convolution_factors(
    x: Tensor,  # (M, C, *places), padded
    g: Tensor,  # (M, O, *positions)
    kernel_size: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    biased: bool,
    sharing: str,
) -> Factors:
    """Of a convolution in any number of dimensions; a chunk of examples is unfolded at a time."""
    positions = math.prod(g.shape[2:])
    width = x.shape[1] // groups * math.prod(kernel_size)
    inputs = x.new_zeros((groups, width + biased, width + biased))
    step = max(1, CHUNK_BYTES // max(1, positions * width * groups * x.element_size()))
    for chunk in torch.split(x, step):
        patches = _patches(chunk, kernel_size, stride, dilation, groups)  # (groups, J, M, T)
        columns = patches.mean(3) if sharing == "reduce" else patches.flatten(2)
        inputs += torch.stack([second_moment(own, biased) for own in columns])
    by_group = g.reshape(len(g), groups, -1, positions).permute(1, 2, 0, 3)  # (groups, O / groups, M, T)
    columns = by_group.sum(3) if sharing == "reduce" else by_group.flatten(2)
    outputs = torch.stack([second_moment(own, False) for own in columns])
    outputs = outputs if sharing == "reduce" else outputs / max(positions, 1)
    return (inputs[0], outputs[0]) if groups == 1 else (inputs, outputs)


def _patches(
    x: Tensor, kernel_size: Sequence[int], stride: Sequence[int], dilation: Sequence[int], groups: int
) -> Tensor:
    """What the kernel sees at each position: (groups, C / groups · kernel, M, T), in the order of the weight.

    Positions come last, because whole rows of an image are then copied at once.
    """
    dims = len(kernel_size)
    for axis, (k, s, d) in enumerate(zip(kernel_size, stride, dilation, strict=True), start=2):
        x = x.unfold(axis, d * (k - 1) + 1, s)[..., ::d]
    x = x.view(len(x), groups, -1, *x.shape[2:])  # (M, groups, C', *positions, *kernel)
    order = (1, 2, *range(3 + dims, 3 + 2 * dims), 0, *range(3, 3 + dims))
    return x.permute(order).flatten(3 + dims).flatten(1, 1 + dims)


def second_moment(vectors: Tensor, biased: bool) -> Tensor:
    """Σ aaᵀ over the columns of (d, n); with a 1 appended to each if `biased`."""
    width = len(vectors)
    moment = vectors.new_empty((width + biased,) * 2)
    _symmetric_product(vectors, moment[:width, :width])
    if biased:
        moment[width, :width] = moment[:width, width] = vectors.sum(1)
        moment[width, width] = vectors.shape[1]
    return moment


def _symmetric_product(vectors: Tensor, out: Tensor) -> None:
    """out ← U Uᵀ; of a large one the upper panels only, mirrored."""
    width = len(vectors)
    step = width if width < _WORTH_CUTTING else -(-width // _PANELS)
    for start in range(0, width, max(step, 1)):
        stop = min(start + step, width)
        out[start:stop, start:] = vectors[start:stop] @ vectors[start:].T
        out[stop:, start:stop] = out[start:stop, stop:].T
