"""What the methods with a damping take for it and for the learning rate when they are not told.

    γ = max(0.03, 300/N)         α = γ/20 for VOGN and OGN, γ/10 for K-FAC and Noisy K-FAC

The noise is at most √(τ/(Nγ)): with few data a fixed γ would drown the initial weights, which are of the order of 0.1,
and nothing would be learnt. Nγ ≥ 300 keeps it below 0.06. While the curvature is small against γ a step is α/γ times
the gradient, so α goes with γ.
"""

import math

from torch import Tensor

from credo.optim import arguments

SMALLEST_DAMPING = 3e-2  # what LeNet-5 on CIFAR-10 needs; with N > 10,000 it decides
DAMPING_TIMES_DATA = 300.0  # Nγ, so that the noise is below 0.06
STEP = 0.05  # α/γ; twice that is too long a step for VOGN early on, with momentum 0.9
KRONECKER_STEP = 0.1


def rate_and_damping(
    lr: float | Tensor | None, damping: float | None, data_size: float, step: float = STEP
) -> tuple[float | Tensor, float]:
    """α and γ, as given or by the rule above; `data_size` is ρN, `step` α/γ. With γ = 0, α is as with the rule's."""
    usual = max(SMALLEST_DAMPING, DAMPING_TIMES_DATA / data_size)
    damping = usual if damping is None else arguments.number("damping", damping, 0, math.inf)
    return step * (damping or usual) if lr is None else lr, damping
