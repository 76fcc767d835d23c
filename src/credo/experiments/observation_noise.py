"""The variance of a regression's observations, fitted on held-out examples: to a regression what T is to classes.

    σ² = argmin mean ½(log(vᵢ + σ²) + (yᵢ − mᵢ)²/(vᵢ + σ²))

m and v are the mean and the variance of the functions at an input. The function of log σ² may have several minima, so a
grid comes first; golden sections around its best point then find it to seven digits.
"""

import math
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from credo.experiments.temperature import HALVES_SEED

LOWEST, HIGHEST = 1e-8, 1e4  # in the units of the targets, squared
POINTS: Final = 241  # twenty a decade
SECTIONS: Final = 60
GOLDEN: Final = (math.sqrt(5) - 1) / 2


def gaussian_nll(mean: Tensor, variance: Tensor, targets: Tensor) -> float:
    """−1/N Σᵢ log N(yᵢ; mᵢ, vᵢ), summed over the outputs of an example."""
    mean, variance = mean.double(), variance.double()
    away = (mean - targets.reshape(mean.shape).double()).square()
    terms = 0.5 * (away / variance + (2 * math.pi * variance).log())
    return float(terms.flatten(1).sum(1).mean())


def fit_noise(mean: Tensor, epistemic: Tensor, targets: Tensor) -> float:
    """σ² for predictions (N, outputs) of examples whose targets are known."""

    def score(logarithm: float) -> float:
        return gaussian_nll(mean, epistemic.double() + math.exp(logarithm), targets)

    low, high = math.log(LOWEST), math.log(HIGHEST)
    step = (high - low) / (POINTS - 1)
    best = min((low + k * step for k in range(POINTS)), key=score)
    return math.exp(_golden(score, max(low, best - step), min(high, best + step)))


def cross_fitted_noise(mean: Tensor, epistemic: Tensor, targets: Tensor) -> tuple[Tensor, list[float]]:
    """Without validation data: σ² of each example from the half that it is not in; (N, 1), and both values."""
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(HALVES_SEED))
    halves, found, values = order.chunk(2), torch.empty(len(targets), 1, dtype=torch.float64), []
    for mine, other in (halves, halves[::-1]):
        values.append(fit_noise(mean[other], epistemic[other], targets[other]))
        found[mine] = values[-1]
    return found, values


def _golden(score: Callable[[float], float], low: float, high: float) -> float:
    for _ in range(SECTIONS):
        left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
        low, high = (low, right) if score(left) < score(right) else (left, high)
    return (low + high) / 2
