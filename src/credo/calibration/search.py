"""The least value of a function of one number, for functions that are costly, smooth and nearly of one valley."""

import math
from collections.abc import Callable
from dataclasses import dataclass

GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Grid:
    step: float
    steps: int  # on each side of 0
    most: int  # steps on one side, where the least value is at its end
    tolerance: float  # of the answer


def minimise(function: Callable[[float], float], grid: Grid, gain: float) -> tuple[float, float]:
    """(x, f(x)) with the least f of all that were evaluated.

    First the points of the grid around 0. While the best is at an end of it, the grid grows there, as long as that
    gains more than `gain`. Then a golden-section search between the neighbours of the best point, down to the
    tolerance. Where the function is not a number it counts as infinite.
    """
    known: dict[float, float] = {}

    def value(x: float) -> float:
        if x not in known:
            found = function(x)
            known[x] = math.inf if math.isnan(found) else found
        return known[x]

    def best_of(points: list[float]) -> float:
        return min(points, key=lambda x: (value(x), abs(x)))

    best = best_of([k * grid.step for k in range(-grid.steps, grid.steps + 1)])
    for direction in (-1, 1):
        for k in range(grid.steps, grid.most):
            if (
                best == direction * k * grid.step
                and value(direction * (k + 1) * grid.step) < value(best) - gain
            ):
                best = direction * (k + 1) * grid.step
    _narrow(value, best - grid.step, best + grid.step, grid.tolerance)
    least = best_of(list(known))
    return least, known[least]


def _narrow(value: Callable[[float], float], low: float, high: float, tolerance: float) -> None:
    """Golden section: one new evaluation shortens the interval to .618 of its length."""
    left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
    while high - low > tolerance:
        if value(left) <= value(right):
            high, right = right, left
            left = high - GOLDEN * (high - low)
        else:
            low, left = left, right
            right = low + GOLDEN * (high - low)
