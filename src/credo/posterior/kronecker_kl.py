"""KL(q‖p) of a matrix-normal layer, exact: ½(tr PΣ + (μ−μ₀)ᵀP(μ−μ₀) − d − log|Σ| − log|P|), P the prior's precision."""

from collections.abc import Mapping

import torch
from torch import Tensor

from credo.posterior.layers import Layer
from credo.posterior.matrix_normal import Root


def to_layer(own: Layer, mean: Mapping[str, Tensor], other: Root, other_mean: Mapping[str, Tensor]) -> Tensor:
    """The prior of the layer is matrix-normal too."""
    away = own.packed(mean).double() - own.packed(other_mean).double()
    distance = other.whiten(away).square().sum()
    return _kl(own.root, own.root.trace_under(other), distance, other.log_det())


def to_diagonal(
    own: Layer,
    mean: Mapping[str, Tensor],
    prior_mean: Mapping[str, Tensor],
    prior_variance: Mapping[str, Tensor],
) -> Tensor:
    """The prior has a variance for each weight."""
    spread = own.packed(prior_variance).double()
    away = own.packed(mean).double() - own.packed(prior_mean).double()
    trace = (own.root.variance().double() / spread).sum()
    return _kl(own.root, trace, (away.square() / spread).sum(), spread.log().sum())


def to_precision(own: Layer, mean: Mapping[str, Tensor], precision: float) -> Tensor:
    """The prior is N(0, 1/δ)."""
    trace, distance = (precision * t.double().sum() for t in (own.root.variance(), own.packed(mean).square()))
    size = own.root.shape.numel()
    return _kl(own.root, trace, distance, -size * torch.tensor(precision, dtype=torch.float64).log())


def _kl(root: Root, trace: Tensor, distance: Tensor, log_det: Tensor) -> Tensor:
    return 0.5 * (trace + distance - root.shape.numel() + log_det - root.log_det())
