"""The least value of a function of one number."""

import math
from collections.abc import Callable

import pytest

from credo.calibration.objectives import Grid, minimise

GRID = Grid(step=1.0, steps=2, most=6, tolerance=0.01)


@pytest.mark.parametrize(
    ("function", "truth"),
    [
        *((lambda x, at=at: (x - at) ** 2, at) for at in (0.0, 0.3, -1.7, 1.999, 4.2, -5.6)),
        (abs, 0.0),
        (lambda x: math.log1p(math.exp(3 * (x - 1))) - x, 1 + math.log(0.5) / 3),
        (lambda x: math.nan if x > 1 else (x - 0.9) ** 2, 0.9),
        (lambda x: math.inf if x < -1 else x, -1.0),
        (lambda x: math.sin(3 * x) + (x - 1) ** 2 / 4, 1.541),
    ],
)
def test_the_least_value_is_found(function: Callable[[float], float], truth: float) -> None:
    x, value = minimise(function, GRID, 1e-9)
    assert x == pytest.approx(truth, abs=0.011)
    assert value == function(x)


def test_the_grid_grows_no_further_than_it_may_and_not_for_nothing() -> None:
    asked: list[float] = []
    minimise(lambda x: asked.append(x) or -x, GRID, 1e-9)  # type: ignore[func-returns-value]
    assert 6 < max(asked) < 7
    asked.clear()
    x, _ = minimise(lambda x: asked.append(x) or 0.0, GRID, 1e-9)  # type: ignore[func-returns-value]
    assert x == 0.0
    assert max(map(abs, asked)) == 2.0


@pytest.mark.parametrize("edge", [-3.3, -0.71, 0.0, 1.234])
def test_of_a_flat_tail_the_upper_end_is_taken(edge: float) -> None:
    """f → 0 as x falls, and exceeds the gain above the edge; seen from other places the answer is the same."""
    for shift in (-0.6, 0.0, 0.4):

        def tail(x: float, shift: float = shift) -> float:
            return 1e-3 * math.exp(2 * (x - shift - edge))

        x, value = minimise(tail, GRID, 1e-3, flat_below=True)
        assert x - shift == pytest.approx(edge, abs=0.05)
        assert value <= 1e-3 * 1.1


def test_a_valley_is_found_with_a_flat_tail_beside_it() -> None:
    for at in (-1.3, 0.0, 1.8):
        x, _ = minimise(lambda x, at=at: -math.exp(-((x - at) ** 2)), GRID, 1e-3, flat_below=True)
        assert x == pytest.approx(at, abs=0.02)


def test_no_point_is_evaluated_twice_and_they_are_few() -> None:
    asked: list[float] = []
    minimise(lambda x: asked.append(x) or (x - 0.4) ** 2, GRID, 1e-9)  # type: ignore[func-returns-value]
    assert len(asked) == len(set(asked)) <= 18
