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


def minimise(
    function: Callable[[float], float], grid: Grid, gain: float, flat_below: bool = False
) -> tuple[float, float]:
    """(x, f(x)) with the least f of all that were evaluated.

    First the points of the grid around 0. While the best is at an end of it, the grid grows there, as long as that
    gains more than `gain`. Then a golden-section search between the neighbours of the best point, down to the
    tolerance. Where the function is not a number it counts as infinite.

    `flat_below` is for functions that may tend to a constant as x falls. Where that is the least value, to within
    `gain`, the answer is the largest x that has it.
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
            further = direction * (k + 1) * grid.step
            if best == direction * k * grid.step and value(further) < value(best) - gain:
                best = further
    _narrow(value, best - grid.step, best + grid.step, grid.tolerance)
    least = best_of(list(known))
    level = known[least] + gain
    if flat_below and value(best - grid.step) <= level:
        least = _edge(value, known, level, grid)
    return least, known[least]


def _edge(value: Callable[[float], float], known: dict[float, float], level: float, grid: Grid) -> float:
    """Between points that are known, the largest x where the function does not exceed the level; by halves."""
    low = max(x for x, found in known.items() if found <= level)
    high = min((x for x in known if x > low), default=low + grid.step)
    while high - low > grid.tolerance:
        middle = (low + high) / 2
        low, high = (middle, high) if value(middle) <= level else (low, middle)
    return low


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
