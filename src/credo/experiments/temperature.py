"""One temperature for finished predictions: p̂ ∝ p̄^(1/T), T where the NLL of held-out examples is smallest.

p̄ is the averaged prediction, so that one number serves a point, an ensemble and a posterior alike. With β = 1/T the NLL

    f(β) = mean(log Σₖ exp(β log p̄ₖ) − β log p̄_y),    f′(β) = mean(E_p̂[log p̄] − log p̄_y)

is convex: f′ rises, and bisection finds its only zero. At the ends of the range, T is the end.
"""

from typing import Final

import torch
from torch import Tensor

LOWEST, HIGHEST = 1e-2, 1e2  # of T
HALVINGS: Final = 60
HALVES_SEED: Final = 0x7E57


def fit_temperature(log_probs: Tensor, targets: Tensor) -> float:
    """T for the log-probabilities (N, classes) of examples whose classes are known."""
    log_probs = log_probs.double()
    true = log_probs.gather(1, targets[:, None]).mean()
    low, high = torch.tensor([1 / HIGHEST, 1 / LOWEST], dtype=torch.float64).log().tolist()
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        beta = torch.tensor(middle, dtype=torch.float64).exp()
        slope = ((beta * log_probs).softmax(1) * log_probs).sum(1).mean() - true
        low, high = (middle, high) if slope <= 0 else (low, middle)
    return float(torch.tensor(-(low + high) / 2, dtype=torch.float64).exp())


def scaled(log_probs: Tensor, temperature: float) -> Tensor:
    """Log-probabilities at that temperature, in float64."""
    return (log_probs.double() / temperature).log_softmax(1)


def cross_fitted(log_probs: Tensor, targets: Tensor) -> tuple[Tensor, list[float]]:
    """Without validation data: each half of the examples at the temperature that the other half gives.

    No example is scaled by a temperature that has seen it (Ashukha et al. 2020). The halves are always the same.
    """
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(HALVES_SEED))
    halves = order.chunk(2)
    found, temperatures = torch.empty_like(log_probs, dtype=torch.float64), []
    for mine, other in (halves, halves[::-1]):
        temperatures.append(fit_temperature(log_probs[other], targets[other]))
        found[mine] = scaled(log_probs[mine], temperatures[-1])
    return found, temperatures
