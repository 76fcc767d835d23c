"""Scores of means and variances against their definitions: integrals and torch's own."""

import math
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import Normal

from credo import metrics
from credo.errors import InvalidType, InvalidValue
from credo.predict import RegressionPrediction


def numbers(*shape: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    mean, targets = (torch.randn(shape, generator=g, dtype=torch.float64) for _ in range(2))
    return mean, torch.rand(shape, generator=g, dtype=torch.float64) + 0.05, targets


SHAPES = pytest.mark.parametrize("shape", [(40,), (40, 1), (20, 3), (5, 2, 4)])


@SHAPES
def test_against_torch(shape: tuple[int, ...]) -> None:
    mean, variance, y = numbers(*shape)
    q = Normal(mean, variance.sqrt())
    assert metrics.rmse(mean, y) == pytest.approx(float(torch.nn.functional.mse_loss(mean, y).sqrt()))
    assert metrics.gaussian_nll(mean, variance, y) == pytest.approx(float(-q.log_prob(y).mean()))
    full = torch.nn.GaussianNLLLoss(full=True)(mean, y, variance)
    assert metrics.gaussian_nll(mean, variance, y) == pytest.approx(float(full))
    for level in (0.5, 0.9, 0.95):
        inside = (q.cdf(y) - 0.5).abs() <= level / 2
        assert metrics.coverage(mean, variance, y, level) == float(inside.double().mean())


def test_the_crps_is_its_integral() -> None:
    mean, variance, y = numbers(8)
    grid = torch.linspace(-15, 15, 300_001, dtype=torch.float64)
    for m, v, t in zip(mean, variance, y, strict=True):
        gap = Normal(m, v.sqrt()).cdf(grid) - (grid >= t).double()
        truth = float(torch.trapezoid(gap.square(), grid))
        assert metrics.crps(m[None], v[None], t[None]) == pytest.approx(truth, abs=1e-4)


def test_calibrated_predictions_are_covered() -> None:
    g = torch.Generator().manual_seed(3)
    y = torch.randn(20_000, generator=g)
    zero = torch.zeros_like(y)
    for level in (0.5, 0.95):
        error = math.sqrt(level * (1 - level) / 20_000)
        assert abs(metrics.coverage(zero, zero + 1, y, level) - level) < 4 * error


def test_certainty() -> None:
    mean, y = torch.tensor([1.0, 2.0]), torch.tensor([1.5, 2.0])
    certain = torch.zeros(2)
    assert metrics.crps(mean, certain, y) == 0.25
    assert metrics.coverage(mean, certain, y) == 0.5
    assert metrics.gaussian_nll(mean[:1], certain[:1], y[:1]) == math.inf
    assert metrics.gaussian_nll(mean[1:], certain[1:], y[1:]) == -math.inf


@SHAPES
def test_evaluate_reports_them(shape: tuple[int, ...]) -> None:
    mean, variance, y = numbers(*shape)
    prediction = SimpleNamespace(mean=mean, variance=variance)
    scores = metrics.evaluate(prediction, y)
    assert scores == {
        "rmse": metrics.rmse(mean, y),
        "nll": metrics.gaussian_nll(mean, variance, y),
        "crps": metrics.crps(mean, variance, y),
        "coverage95": metrics.coverage(mean, variance, y),
    }
    assert metrics.evaluate(prediction, y.numpy()) == scores  # type: ignore[arg-type]


def test_a_column_and_a_row_are_the_same_and_nothing_else_is_broadcast() -> None:
    mean, _, y = numbers(6, 1)
    truth = metrics.rmse(mean, y)
    assert metrics.rmse(mean, y.flatten()) == metrics.rmse(mean.flatten(), y) == truth
    for wrong in (y[:5], y.expand(6, 6), y.T, y[0], torch.zeros(())):
        with pytest.raises(InvalidValue, match="targets has shape"):
            metrics.rmse(mean, wrong)


@pytest.mark.parametrize(
    ("change", "error", "word"),
    [
        ({"mean": [1.0]}, InvalidType, "mean"),
        ({"mean": torch.ones(0), "targets": torch.ones(0)}, InvalidValue, "no examples"),
        ({"mean": torch.tensor([math.nan, 1, 1])}, InvalidValue, "mean holds"),
        ({"targets": torch.tensor([math.inf, 1, 1])}, InvalidValue, "targets holds"),
        ({"targets": None}, InvalidType, "targets is None"),
        ({"targets": np.array(["a", "b", "c"])}, InvalidType, "targets"),
        ({"variance": torch.tensor([-1.0, 1, 1])}, InvalidValue, "below 0"),
        ({"variance": torch.tensor([math.nan, 1, 1])}, InvalidValue, "NaN"),
        ({"variance": torch.ones(1)}, InvalidValue, r"variance has shape \(1,\)"),
        ({"variance": 1.0}, InvalidType, "variance"),
    ],
)
def test_bad_arguments(change: dict[str, object], error: type[Exception], word: str) -> None:
    given = {"mean": torch.ones(3), "variance": torch.ones(3), "targets": torch.ones(3)} | change
    with pytest.raises(error, match=word):
        metrics.crps(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize(("level", "error"), [(0, InvalidValue), (1.0, InvalidValue), ("x", InvalidType)])
def test_the_level_is_a_share(level: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="level"):
        metrics.coverage(torch.ones(1), torch.ones(1), torch.ones(1), level)  # type: ignore[arg-type]


def test_evaluate_refuses_what_it_cannot_score() -> None:
    with pytest.raises(InvalidType, match="without probs"):
        metrics.evaluate(3, torch.ones(1))  # type: ignore[arg-type]
    values = SimpleNamespace(mean=torch.ones(1), variance=torch.ones(1))
    with pytest.raises(InvalidValue, match="ood is for"):
        metrics.evaluate(values, torch.ones(1), ood=values)


def test_a_prediction_without_noise_is_warned_of() -> None:
    """Its variance is that of the mean, and NLL and coverage ask for that of observations."""
    mean, variance, y = numbers(20, 1)
    with pytest.warns(UserWarning, match="without noise.*noise=variance"):
        metrics.evaluate(RegressionPrediction(mean, variance, torch.zeros_like(mean), variance), y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        metrics.evaluate(RegressionPrediction(mean, variance, variance / 2, variance / 2), y)
        metrics.evaluate(SimpleNamespace(mean=mean, variance=variance), y)


def test_a_mean_beside_a_variance_in_one_output_is_explained() -> None:
    mean, variance, y = numbers(20, 2)
    with pytest.raises(InvalidValue, match="noise='model'"):
        metrics.evaluate(SimpleNamespace(mean=mean, variance=variance), y[:, 0])
