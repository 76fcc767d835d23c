"""How far a task's start is still felt at its end."""

import math

from credo.continual.learner import Annealing, annealed
from credo.optim import arguments


def share_left(
    steps: int,
    *,
    lr: float,
    ema_rate: float,
    initial_precision: float,
    prior_precision: float = 1.0,
    annealing: Annealing | None = None,
) -> float:
    """The share of μ − μ₀, the mean's distance from the prior's, that is left after a task of so many steps.

        Π (1 − αₜP₀/Pₜ),  Pₜ = P₀ + max(P − P₀, 0)·Π(1 − βₜ),  both rates annealed

    This is VOGN (without momentum and damping) on a weight that the task's data do not reach, which only the prior
    moves. A mean that starts afresh must have come back there: what is left is forgotten, of all tasks before.
    Weights that the data do reach return more slowly, so let it be far below one in a hundred.
    """
    arguments.whole("steps", steps, 1)
    numbers = {"lr": lr, "initial_precision": initial_precision, "prior_precision": prior_precision}
    for name, value in numbers.items():
        arguments.number(name, value, 0, math.inf, open_low=True)
    arguments.number("ema_rate", ema_rate, 0, 1, open_low=True)
    rate_at = annealing or annealed()
    share, excess = 1.0, max(initial_precision / prior_precision - 1.0, 0.0)
    for step in range(steps):
        factor = rate_at(step / steps)
        excess *= 1 - ema_rate * factor
        share *= 1 - lr * factor / (1 + excess)
    return share
