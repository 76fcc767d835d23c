"""Numbers to look at when training fails: what is noise, what is signal, and what sets the step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from credo.optim.beliefs import Belief


@dataclass(frozen=True)
class GroupDiagnostics:
    """One parameter group. Shares are means over its weights and sum to one; NaN where there is nothing to tell.

    A layer with Kronecker factors has the directions of its eigenvectors in the place of weights, for the shares; it
    counts where its weight is. Bayes by Backprop has no s: what is not the prior's in 1/σ² is what the data have said,
    and less than nothing while σ is wider than the prior.
    """

    signal_to_noise: float  # median of |μ|/σ; far below 1: the noise drowns the weights
    curvature_share: float  # of s in s + δ̃ + γ: what the data say
    prior_share: float  # of δ̃
    damping_share: float  # of γ; near 1: the step is α/γ·m, and σ² does not depend on the data
    step_size: (
        float  # median of α/(s + δ̃ + γ), what a unit of m moves the mean by; Bayes by Backprop: the inner's α
    )
    noise: float  # median of σ
    weights: int
    refused_steps: int


class Part(NamedTuple):
    """Some weights of a group; the shares may be of as many directions instead."""

    mean: Tensor
    sigma: Tensor
    step: Tensor  # the diagonal of the inverse that the gradient is multiplied by
    curvature: Tensor
    prior: Tensor
    damping: Tensor


def part_of(belief: Belief) -> Part:
    """A parameter whose precision is s + δ̃ + γ, weight by weight."""
    variance = belief.variance()
    precision = belief.scale / variance
    s = torch.zeros_like(precision) if belief.curvature is None else belief.curvature
    rest = precision - s
    damping = belief.damping / precision
    mean = belief.parameter.detach()
    return Part(mean, variance.sqrt(), 1 / precision, s / precision, rest / precision - damping, damping)


def summarise(group: Mapping[str, Any], parts: Sequence[Part], refused: int) -> GroupDiagnostics:
    columns = [torch.cat([column.flatten() for column in some]) for some in zip(*parts, strict=True)]
    whole = Part(*(columns or [torch.empty(0)] * len(Part._fields)))
    certain = group["deterministic"]
    return GroupDiagnostics(
        signal_to_noise=float("inf") if certain else float((whole.mean.abs() / whole.sigma).median()),
        curvature_share=float(whole.curvature.mean()),
        prior_share=float(whole.prior.mean()),
        damping_share=float(whole.damping.mean()),
        step_size=float((float(group["lr"]) * whole.step).median()),
        noise=0.0 if certain else float(whole.sigma.median()),
        weights=whole.mean.numel(),
        refused_steps=refused,
    )
