"""The fitted variance of observations against closed forms and a dense search; the record of a regression."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributions import Normal

from credo.data.examples import Examples, Splits
from credo.experiments.recalibration import cross_fitted_noise, fit_noise, gaussian_nll
from credo.experiments.recipe import Training
from credo.experiments.records import read_record, write_record
from credo.experiments.train import train


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def problem(n: int = 500, spread: bool = True) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = generator()
    epistemic = torch.rand(n, 1, generator=g, dtype=torch.float64) * spread
    mean = torch.randn(n, 1, generator=g, dtype=torch.float64)
    noise = torch.randn(n, 1, generator=g, dtype=torch.float64)
    return mean, epistemic, mean + noise * (epistemic + 0.25).sqrt()


def test_the_nll_is_that_of_a_gaussian() -> None:
    mean, epistemic, targets = problem()
    truth = -Normal(mean, (epistemic + 0.3).sqrt()).log_prob(targets).mean().item()
    assert gaussian_nll(mean, epistemic + 0.3, targets) == pytest.approx(truth, rel=1e-12)


def test_without_a_spread_it_is_the_mean_square() -> None:
    mean, epistemic, targets = problem(spread=False)
    truth = (mean - targets).square().mean().item()
    assert fit_noise(mean, epistemic, targets) == pytest.approx(truth, rel=1e-6)


def test_it_is_the_best_of_a_dense_search() -> None:
    mean, epistemic, targets = problem()
    found = fit_noise(mean, epistemic, targets)
    assert found == pytest.approx(0.25, rel=0.5)
    best = gaussian_nll(mean, epistemic + found, targets)
    for logarithm in torch.linspace(-15, 8, 500).tolist():
        assert gaussian_nll(mean, epistemic + math.exp(logarithm), targets) >= best - 1e-12


def test_a_spread_that_is_wide_enough_needs_no_noise() -> None:
    mean, epistemic, targets = problem()
    assert fit_noise(mean, epistemic + 10, targets) < 1e-7


def test_each_tenth_has_the_variance_that_the_others_give() -> None:
    mean, epistemic, targets = problem(n=101)
    noise, values = cross_fitted_noise(mean, epistemic, targets)
    assert len(values) == len(set(values)) == 10
    for value in values:
        mine = (noise == value).flatten()
        assert int(mine.sum()) in (10, 11)
        assert value == pytest.approx(fit_noise(mean[~mine], epistemic[~mine], targets[~mine]), rel=1e-6)


STD = 4.0


def line() -> Splits:
    x = torch.randn(80, 2, generator=generator(1))
    y = x @ torch.tensor([[1.0], [-0.5]]) + 0.3 * torch.randn(80, 1, generator=generator(2))
    return Splits("line", Examples(x[:60], y[:60]), Examples(x[60:], y[60:]), target_std=STD)


def linear() -> nn.Module:
    return nn.Linear(2, 1)


@pytest.mark.parametrize("held_out", [None, 20])
def test_the_record_of_a_regression_is_in_the_units_of_the_data(tmp_path: Path, held_out: int | None) -> None:
    training = Training(
        "laplace",
        linear,
        line,
        {"lr": 0.05, "noise_variance": 0.5, "structure": "kronecker"},
        epochs=5,
        batch_size=20,
        task="regression",
    )
    result = train(replace(training, validation_size=held_out), 0, tmp_path / "run")
    lines = read_record(write_record(tmp_path / "run", tmp_path / "record.jsonl"))
    final, found = lines[-1], result.predictions()
    assert [line["kind"] for line in lines] == ["run", *["epoch"] * 5, "final"]
    mean, targets = found["test.mean"] * STD, found["test.targets"] * STD
    assert final["as_trained"]["rmse"] == pytest.approx(
        (mean - targets).square().mean().sqrt().item(), rel=1e-5
    )
    truth = -Normal(mean, found["test.variance"].sqrt() * STD).log_prob(targets).mean().item()
    assert final["as_trained"]["nll"] == pytest.approx(truth, rel=1e-5)
    assert final["after_noise"]["rmse"] == final["as_trained"]["rmse"]
    assert len(final["noise_variances"]) == (10 if held_out is None else 1)
    if held_out is not None:
        parts = [found[f"validation.{name}"] for name in ("mean", "epistemic", "targets")]
        assert final["noise_variances"] == [fit_noise(*parts)]
        variance = (found["test.epistemic"].double() + final["noise_variances"][0]) * STD**2
        truth = -Normal(mean.double(), variance.sqrt()).log_prob(targets.double()).mean().item()
        assert final["after_noise"]["nll"] == pytest.approx(truth, rel=1e-5)
