"""One number fitted to finished predictions: a temperature for classes, a variance of the observations for regression.

The temperature: p̂ ∝ p̄^(1/T), T where the NLL of held-out examples is smallest. p̄ is the averaged prediction, so that
one number serves a point, an ensemble and a posterior alike. With β = 1/T and N examples

    f(β) = mean(log Σₖ exp(β log p̄ₖ) − β log p̄_y) + (β − 1)²/2N,    f′(β) = mean(E_p̂[log p̄] − log p̄_y) + (β − 1)/N

is convex: f′ rises, and bisection finds its only zero. At the ends of the range, T is the end. The last term is a prior
β ~ N(1, 1). It counts little beside a hundred errors. Where no example is wrong the NLL alone has its minimum at T = 0,
and then the first error elsewhere costs more than all that was gained.
"""

import math
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 1e-2, 1e2  # of T
HALVINGS: Final = 60
FOLDS: Final = 10  # few errors are shared out badly between two halves
FOLDS_SEED: Final = 0x7E57


def fit_temperature(log_probs: Tensor, targets: Tensor) -> float:
    """T for the log-probabilities (N, classes) of examples whose classes are known."""
    log_probs = log_probs.double()
    true = log_probs.gather(1, targets[:, None]).mean()
    low, high = (
        torch.tensor([1 / HIGHEST_TEMPERATURE, 1 / LOWEST_TEMPERATURE], dtype=torch.float64).log().tolist()
    )
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        beta = torch.tensor(middle, dtype=torch.float64).exp()
        slope = ((beta * log_probs).softmax(1) * log_probs).sum(1).mean() - true + (beta - 1) / len(targets)
        low, high = (middle, high) if slope <= 0 else (low, middle)
    return float(torch.tensor(-(low + high) / 2, dtype=torch.float64).exp())


def scaled(log_probs: Tensor, temperature: float) -> Tensor:
    """Log-probabilities at that temperature, in float64."""
    return (log_probs.double() / temperature).log_softmax(1)


def folds(examples: int) -> list[tuple[Tensor, Tensor]]:
    """(scored, fitted on) for each fold; always the same."""
    order = torch.randperm(examples, generator=torch.Generator().manual_seed(FOLDS_SEED))
    parts = order.tensor_split(min(FOLDS, examples))
    return [(part, torch.cat([p for p in parts if p is not part])) for part in parts]


def cross_fitted(log_probs: Tensor, targets: Tensor) -> tuple[Tensor, list[float]]:
    """Without validation data: each tenth of the examples at the temperature that the others give.

    No example is scaled by a temperature that has seen it (Ashukha et al. 2020).
    """
    found, temperatures = torch.empty_like(log_probs, dtype=torch.float64), []
    for mine, others in folds(len(targets)):
        temperatures.append(fit_temperature(log_probs[others], targets[others]))
        found[mine] = scaled(log_probs[mine], temperatures[-1])
    return found, temperatures


# The variance of a regression's observations, fitted on held-out examples: to a regression what T is to classes.
#
#     σ² = argmin mean ½(log(vᵢ + σ²) + (yᵢ − mᵢ)²/(vᵢ + σ²))
#
# m and v are the mean and the variance of the functions at an input. The function of log σ² may have several minima, so
# a grid comes first; golden sections around its best point then find it to seven digits.

LOWEST_VARIANCE, HIGHEST_VARIANCE = 1e-8, 1e4  # in the units of the targets, squared
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

    low, high = math.log(LOWEST_VARIANCE), math.log(HIGHEST_VARIANCE)
    step = (high - low) / (POINTS - 1)
    best = min((low + k * step for k in range(POINTS)), key=score)
    return math.exp(_golden(score, max(low, best - step), min(high, best + step)))


def cross_fitted_noise(mean: Tensor, epistemic: Tensor, targets: Tensor) -> tuple[Tensor, list[float]]:
    """Without validation data: σ² of each example from the tenths that it is not in; (N, 1), and every value."""
    found, values = torch.empty(len(targets), 1, dtype=torch.float64), []
    for mine, others in folds(len(targets)):
        values.append(fit_noise(mean[others], epistemic[others], targets[others]))
        found[mine] = values[-1]
    return found, values


def _golden(score: Callable[[float], float], low: float, high: float) -> float:
    for _ in range(SECTIONS):
        left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
        low, high = (low, right) if score(left) < score(right) else (left, high)
    return (low + high) / 2
