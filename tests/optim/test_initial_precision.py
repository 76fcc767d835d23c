"""Where the precision starts: at the given one, or at the prior's where that is larger."""

import math

import pytest
import torch
from torch import nn

import credo
from credo.errors import CredoError

METHODS = [credo.VOGN, credo.OGN]


def sharp_and_dull() -> credo.DiagonalPosterior:
    precision = torch.tensor([[1.0, 99.0, 101.0, 1e7]])
    return credo.DiagonalPosterior({"weight": torch.full((1, 4), 0.3)}, {"weight": 1 / precision})


@pytest.mark.parametrize("tempering", [1.0, 0.2])
@pytest.mark.parametrize("method", METHODS)
def test_the_larger_of_prior_and_start(method, tempering):
    optimizer = method(
        nn.Linear(4, 1, bias=False),
        data_size=50,
        prior=sharp_and_dull(),
        initial_precision=100.0,
        damping=0.0,
        tempering=tempering,
    )
    precision = 1 / optimizer.posterior().variance["weight"]
    torch.testing.assert_close(precision, torch.tensor([[100.0, 100.0, 101.0, 1e7]]), rtol=1e-5, atol=0)
    assert optimizer.curvature()["weight"].min() >= 0


@pytest.mark.parametrize("method", METHODS)
def test_without_a_posterior_as_prior_and_with_normalisation_layers(method):
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    optimizer = method(model, data_size=10, prior_precision=7.0, initial_precision=20.0, damping=0.0)
    for name in ("0.weight", "0.bias"):
        torch.testing.assert_close(
            1 / optimizer.posterior().variance[name],
            torch.full_like(model[0].weight, 20.0)[0, 0].expand(model.state_dict()[name].shape),
        )
    assert optimizer.curvature()["1.weight"].tolist() == pytest.approx([2.0, 2.0])  # τP/N, having no prior
    sharper = method(nn.Linear(3, 2), data_size=10, prior_precision=30.0, initial_precision=20.0, damping=0.0)
    assert float((1 / sharper.posterior().variance["bias"])[0]) == pytest.approx(30.0)


def test_the_excess_fades_geometrically():
    model = nn.Linear(1, 1, bias=False).double()
    optimizer = credo.VOGN(
        model,
        0.1,
        data_size=10,
        prior_precision=2.0,
        initial_precision=1000.0,
        damping=0.0,
        ema_rate=0.25,
        momentum=0.0,
    )
    for step in range(1, 6):
        optimizer.step(lambda: 0 * model(torch.ones(4, 1, dtype=torch.float64)).square().mean())
        expected = 2.0 + 998.0 * 0.75**step
        assert float(1 / optimizer.posterior().variance["weight"]) == pytest.approx(expected, rel=1e-9)


def test_a_sharp_prior_pulls_without_overshooting():
    """From a start below the prior's precision a step would be α·P₀/P times the distance: here a thousand times."""
    model = nn.Linear(4, 1, bias=False)
    optimizer = credo.VOGN(
        model, 0.1, data_size=50, prior=sharp_and_dull(), initial_precision=1.0, damping=0.0, momentum=0.0
    )
    before = (model.weight.detach() - 0.3).abs()
    optimizer.step(lambda: 0 * model(torch.ones(4, 4)).square().mean())
    torch.testing.assert_close((model.weight.detach() - 0.3).abs(), 0.9 * before, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, "1e6", True, torch.ones(2)])
@pytest.mark.parametrize("method", METHODS)
def test_bad_values(method, value):
    with pytest.raises(CredoError, match="initial_precision"):
        method(nn.Linear(2, 2), data_size=10, initial_precision=value)


def test_two_starts_exclude_each_other():
    with pytest.raises(CredoError, match="exclude"):
        credo.VOGN(nn.Linear(2, 2), data_size=10, initial_precision=1.0, initial_curvature=1.0)


def test_resumes_exactly():
    def run(steps: int, saved: dict | None = None):
        generator = torch.Generator().manual_seed(0)
        x, y = torch.randn(20, 3, generator=generator), torch.randn(20, 1, generator=generator)
        torch.default_generator.manual_seed(0)
        model = nn.Linear(3, 1)
        optimizer = credo.VOGN(model, data_size=20, initial_precision=500.0)
        if saved:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        for _ in range(steps):
            optimizer.step(lambda: (model(x) - y).square().mean(1))
        return model, optimizer

    whole, _ = run(6)
    half, optimizer = run(3)
    rest, _ = run(3, {"model": half.state_dict(), "optimizer": optimizer.state_dict()})
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), rest.parameters(), strict=True))
