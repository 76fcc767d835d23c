"""Sums over independent Gaussians, as pure functions of tensors, accumulated in float64."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

LOG_2PI = math.log(2 * math.pi)


def total(terms: Iterable[Tensor], device: torch.device) -> Tensor:
    return sum((term.sum() for term in terms), torch.zeros((), dtype=torch.float64, device=device))


def kl_terms(mean: Tensor, variance: Tensor, prior_mean: Tensor, prior_variance: Tensor) -> Tensor:
    """½(r − 1 − log r + (μ−μ₀)²/σ₀²) with r = σ²/σ₀², per weight."""
    mean, variance, prior_mean, prior_variance = (
        t.double() for t in (mean, variance, prior_mean, prior_variance)
    )
    excess = (variance - prior_variance) / prior_variance  # r − 1, without cancellation when q is near p
    return 0.5 * (excess - torch.log1p(excess) + (mean - prior_mean) ** 2 / prior_variance)


def entropy_terms(variance: Tensor) -> Tensor:
    """½(1 + log 2πσ²), per weight."""
    return 0.5 * (1 + LOG_2PI + variance.double().log())


def log_prob_terms(value: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """−½(log 2πσ² + (w−μ)²/σ²), per weight."""
    value, mean, variance = value.double(), mean.double(), variance.double()
    return -0.5 * (LOG_2PI + variance.log() + (value - mean) ** 2 / variance)
