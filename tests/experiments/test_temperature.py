"""One temperature against a dense search, and the record of a run against its own numbers."""

import math

import pytest
import torch

from credo import metrics
from credo.experiments.recalibration import (
    LOWEST_TEMPERATURE,
    cross_fitted,
    fit_temperature,
    scaled,
)
from credo.experiments.records import class_scores


def problem(sharpness: float, n: int = 4000) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels drawn from softmax(z), predictions softmax(sharpness · z): the best temperature is the sharpness."""
    generator = torch.Generator().manual_seed(1)
    logits = 2 * torch.randn(n, 5, generator=generator, dtype=torch.float64)
    targets = torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]
    return (sharpness * logits).log_softmax(1), targets


def nll(log_probs: torch.Tensor, targets: torch.Tensor) -> float:
    return -log_probs.gather(1, targets[:, None]).mean().item()


def objective(log_probs: torch.Tensor, targets: torch.Tensor, temperature: float) -> float:
    """The NLL at T and the prior's (1/T − 1)²/2N."""
    return nll(scaled(log_probs, temperature), targets) + (1 / temperature - 1) ** 2 / (2 * len(targets))


@pytest.mark.parametrize("sharpness", [0.3, 1.0, 4.0])
def test_the_temperature_is_the_best_of_a_dense_search(sharpness: float) -> None:
    log_probs, targets = problem(sharpness)
    found = fit_temperature(log_probs, targets)
    assert found == pytest.approx(sharpness, rel=0.05)
    best = objective(log_probs, targets, found)
    for factor in (0.9, 0.99, 0.999, 1.001, 1.01, 1.1):
        assert objective(log_probs, targets, found * factor) > best
    up, down = (objective(log_probs, targets, found * factor) for factor in (1.0001, 1 / 1.0001))
    assert abs(up - down) / 2e-4 < 1e-6
    assert found == pytest.approx(sharpness, rel=0.05)


def test_float32_and_the_ends_of_the_range() -> None:
    log_probs, targets = problem(2.0)
    assert fit_temperature(log_probs.float(), targets) == pytest.approx(
        fit_temperature(log_probs, targets), rel=1e-5
    )


@pytest.mark.parametrize("n", [10, 300])
def test_without_an_error_the_temperature_stays_in_reach(n: int) -> None:
    """The NLL alone would have T = 0, or with nothing right T = ∞; the objective has a minimum inside."""
    log_probs = torch.full((n, 3), -4.0, dtype=torch.float64)
    log_probs[:, 1] = -0.02
    log_probs = log_probs.log_softmax(1)
    for target in (1, 0):
        targets = torch.full((n,), target)
        found = fit_temperature(log_probs, targets)
        grid = torch.logspace(-2, 2, 4001, dtype=torch.float64).tolist()
        best = min(grid, key=lambda t: objective(log_probs, targets, t))
        assert found == pytest.approx(best, rel=2e-3)
        assert found > LOWEST_TEMPERATURE
    assert 0.2 < fit_temperature(log_probs, torch.ones(n, dtype=torch.long)) < 1
    assert fit_temperature(log_probs, torch.zeros(n, dtype=torch.long)) > 5
    log_probs[0] = log_probs[0].roll(1)
    lone_error = scaled(log_probs, fit_temperature(log_probs[1:], torch.ones(n - 1, dtype=torch.long)))
    assert nll(lone_error[:1], torch.ones(1, dtype=torch.long)) < 5 * 4.0


def test_without_validation_data_no_example_is_scaled_by_a_temperature_that_has_seen_it() -> None:
    log_probs, targets = problem(3.0, n=401)
    found, temperatures = cross_fitted(log_probs, targets)
    assert len(temperatures) == 10
    assert temperatures == pytest.approx([3.0] * 10, rel=0.25)
    first = (found - scaled(log_probs, temperatures[0])).abs().amax(1) < 1e-9
    assert first.sum().item() in (40, 41)
    changed = targets.clone()
    changed[first] = (changed[first] + 1) % 5  # what a tenth says of itself does not matter to it
    again, _ = cross_fitted(log_probs, changed)
    assert torch.equal(again[first], found[first])
    assert not torch.equal(again[~first], found[~first])


@pytest.mark.parametrize("n", [2, 7])
def test_few_examples_have_fewer_parts(n: int) -> None:
    log_probs, targets = problem(1.0, n=n)
    found, temperatures = cross_fitted(log_probs, targets)
    assert len(temperatures) == n
    assert bool(found.isfinite().all())


def test_scores_come_from_logarithms_so_that_a_tiny_probability_is_no_infinity() -> None:
    log_probs = torch.tensor([[-800.0, 0.0], [-0.1, math.log1p(-math.exp(-0.1))]], dtype=torch.float64)
    targets = torch.tensor([0, 0])
    found = class_scores(log_probs, targets)
    assert found["nll"] == pytest.approx((800 + 0.1) / 2)
    assert math.isinf(metrics.nll(log_probs.exp(), targets))
    assert found["accuracy"] == 0.5
