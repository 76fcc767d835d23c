"""The ELBO of Bayesian linear regression, whose every term has a closed form."""

import math

import pytest
import torch
from torch import Tensor, nn

from credo.errors import InvalidType, InvalidValue
from credo.posterior import DiagonalPosterior, elbo

N, D, NOISE = 40, 3, 0.5


def setting() -> tuple[nn.Linear, DiagonalPosterior, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(N, D, generator=g, dtype=torch.float64)
    y = x @ torch.tensor([1.0, -2.0, 0.5]).double() + NOISE * torch.randn(N, generator=g, dtype=torch.float64)
    model = nn.Linear(D, 1, bias=False, dtype=torch.float64)
    mean = torch.randn(1, D, generator=g, dtype=torch.float64)
    variance = torch.rand(1, D, generator=g, dtype=torch.float64) / 10 + 0.01
    return model, DiagonalPosterior({"weight": mean}, {"weight": variance}), x, y


def loss_on(x: Tensor, y: Tensor, model: nn.Module) -> Tensor:
    return -torch.distributions.Normal(model(x)[:, 0], NOISE).log_prob(y).mean()


def exact_nll(q: DiagonalPosterior, x: Tensor, y: Tensor) -> float:
    """Σᵢ ½log 2πσ² + ((yᵢ−μᵀxᵢ)² + xᵢᵀΣxᵢ)/2σ²."""
    residual = (y - x @ q.mean["weight"][0]) ** 2 + x**2 @ q.variance["weight"][0]
    return float((0.5 * math.log(2 * math.pi * NOISE**2) + residual / (2 * NOISE**2)).sum())


@pytest.mark.parametrize("tempering", [1.0, 0.1])
def test_the_elbo_is_that_of_linear_regression(tempering: float) -> None:
    model, q, x, y = setting()
    result = elbo(
        model,
        q,
        lambda m: loss_on(x, y, m),
        data_size=N,
        prior_precision=2.0,
        tempering=tempering,
        samples=2000,
    )
    assert abs(result.expected_nll - exact_nll(q, x, y)) < 5 * result.standard_error
    assert result.standard_error < 0.05 * result.expected_nll
    assert result.kl == float(q.kl(2.0))
    assert result.elbo == -result.expected_nll - tempering * result.kl


def test_a_minibatch_estimates_the_whole_by_its_mean() -> None:
    model, q, x, y = setting()
    full = elbo(model, q, lambda m: loss_on(x, y, m), data_size=N, seed=3)
    halves = [
        elbo(model, q, lambda m, h=h: loss_on(x[h::2], y[h::2], m), data_size=N, seed=3) for h in (0, 1)
    ]
    assert full.expected_nll == pytest.approx(sum(h.expected_nll for h in halves) / 2, rel=1e-12)


def test_the_elbo_never_exceeds_the_evidence_and_the_exact_posterior_reaches_it() -> None:
    """One weight, so that the exact posterior is diagonal."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(N, 1, generator=g, dtype=torch.float64)
    y = 0.7 * x[:, 0] + NOISE * torch.randn(N, generator=g, dtype=torch.float64)
    precision = 1 + (x**2).sum() / NOISE**2
    mean = (x[:, 0] @ y) / NOISE**2 / precision
    cover = NOISE**2 * torch.eye(N).double() + x @ x.T
    evidence = float(torch.distributions.MultivariateNormal(torch.zeros(N).double(), cover).log_prob(y))
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    exact = DiagonalPosterior({"weight": mean.view(1, 1)}, {"weight": (1 / precision).view(1, 1)})
    result = elbo(model, exact, lambda m: loss_on(x, y, m), data_size=N, samples=2000)
    assert result.elbo == pytest.approx(evidence, abs=5 * result.standard_error)
    off = DiagonalPosterior({"weight": (mean + 0.3).view(1, 1)}, {"weight": (2 / precision).view(1, 1)})
    result = elbo(model, off, lambda m: loss_on(x, y, m), data_size=N, samples=2000)
    assert result.elbo < evidence - 5 * result.standard_error


def test_model_and_random_streams_are_untouched() -> None:
    model, q, x, y = setting()
    weight, state = model.weight.detach().clone(), torch.get_rng_state()
    first = elbo(model, q, lambda m: loss_on(x, y, m) + 0 * torch.rand(()), data_size=N)
    assert first == elbo(model, q, lambda m: loss_on(x, y, m) + 0 * torch.rand(()), data_size=N)
    assert torch.equal(model.weight, weight)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training


def test_a_posterior_as_prior() -> None:
    model, q, x, y = setting()
    assert elbo(model, q, lambda m: loss_on(x, y, m), data_size=N, prior=q, samples=1).kl == 0.0


@pytest.mark.parametrize(
    ("change", "error", "word"),
    [
        ({"data_size": 0}, InvalidValue, "data_size"),
        ({"data_size": 1.5}, InvalidType, "data_size"),
        ({"tempering": 0.0}, InvalidValue, "tempering"),
        ({"samples": 0}, InvalidValue, "samples"),
        ({"samples": True}, InvalidType, "samples"),
        ({"seed": -1}, InvalidValue, "seed"),
        ({"prior_precision": -1.0}, InvalidValue, "prior_precision"),
        ({"loss": lambda m: torch.ones(3)}, InvalidValue, r"\(3,\)"),
        ({"loss": lambda m: None}, InvalidType, "NoneType"),
        ({"model": nn.Linear(2, 2)}, InvalidValue, "does not fit"),
        ({"model": "model"}, InvalidType, "model"),
    ],
)
def test_bad_arguments(change: dict[str, object], error: type[Exception], word: str) -> None:
    model, q, x, y = setting()
    arguments = {"model": model, "posterior": q, "loss": lambda m: loss_on(x, y, m), "data_size": N} | change
    with pytest.raises(error, match=word):
        elbo(**arguments)  # type: ignore[arg-type]
