"""One temperature against a dense search, and the record of a run against its own numbers."""

import math

import pytest
import torch

from credo import metrics
from credo.experiments.recalibration import (
    HIGHEST_TEMPERATURE,
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


@pytest.mark.parametrize("sharpness", [0.3, 1.0, 4.0])
def test_the_temperature_is_the_best_of_a_dense_search(sharpness: float) -> None:
    log_probs, targets = problem(sharpness)
    found = fit_temperature(log_probs, targets)
    assert found == pytest.approx(sharpness, rel=0.05)
    best = nll(scaled(log_probs, found), targets)
    for factor in (0.9, 0.99, 0.999, 1.001, 1.01, 1.1):
        assert nll(scaled(log_probs, found * factor), targets) > best
    slope = (
        nll(scaled(log_probs, found * 1.0001), targets) - nll(scaled(log_probs, found / 1.0001), targets)
    ) / 2e-4
    assert abs(slope) < 1e-6


def test_float32_and_the_ends_of_the_range() -> None:
    log_probs, targets = problem(2.0)
    assert fit_temperature(log_probs.float(), targets) == pytest.approx(
        fit_temperature(log_probs, targets), rel=1e-5
    )
    always_right = torch.full((10, 3), -1.5, dtype=torch.float64)
    always_right[:, 1] = -0.5
    assert fit_temperature(always_right, torch.ones(10, dtype=torch.long)) == pytest.approx(
        LOWEST_TEMPERATURE
    )
    assert fit_temperature(always_right, torch.zeros(10, dtype=torch.long)) == pytest.approx(
        HIGHEST_TEMPERATURE
    )


def test_without_validation_data_no_example_is_scaled_by_a_temperature_that_has_seen_it() -> None:
    log_probs, targets = problem(3.0, n=401)
    found, temperatures = cross_fitted(log_probs, targets)
    assert len(temperatures) == 2
    assert temperatures == pytest.approx([3.0, 3.0], rel=0.25)
    ratios = (found.softmax(1).log() - scaled(log_probs, temperatures[0])).abs().amax(1) < 1e-9
    assert ratios.sum().item() in (200, 201)
    changed = targets.clone()
    changed[ratios] = (changed[ratios] + 1) % 5  # what the first half says of itself does not matter to it
    again, _ = cross_fitted(log_probs, changed)
    assert torch.equal(again[ratios], found[ratios])
    assert not torch.equal(again[~ratios], found[~ratios])


def test_scores_come_from_logarithms_so_that_a_tiny_probability_is_no_infinity() -> None:
    log_probs = torch.tensor([[-800.0, 0.0], [-0.1, math.log1p(-math.exp(-0.1))]], dtype=torch.float64)
    targets = torch.tensor([0, 0])
    found = class_scores(log_probs, targets)
    assert found["nll"] == pytest.approx((800 + 0.1) / 2)
    assert math.isinf(metrics.nll(log_probs.exp(), targets))
    assert found["accuracy"] == 0.5
