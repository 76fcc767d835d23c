"""Regression against the closed forms of a linear model and the law of total variance."""

import math

import pytest
import torch
from torch import Tensor, nn

from credo.errors import InvalidType, InvalidValue
from credo.posterior import DiagonalPosterior
from credo.predict import RegressionPrediction, predict
from tests.predict.models import generator, rows


def linear(outputs: int = 1) -> tuple[nn.Linear, DiagonalPosterior]:
    model = nn.Linear(4, outputs, dtype=torch.float64)
    g = generator(3)
    mean = {
        name: torch.randn(p.shape, generator=g, dtype=torch.float64) for name, p in model.named_parameters()
    }
    variance = {
        name: torch.rand(p.shape, generator=g, dtype=torch.float64) for name, p in model.named_parameters()
    }
    return model, DiagonalPosterior(mean, variance)


def test_a_linear_model_has_the_exact_predictive_moments() -> None:
    """mean μᵀx; epistemic variance xᵀΣx: z-scores of both below 5."""
    (model, q), x, samples = linear(), rows(20).double(), 4000
    found = predict(model, q, x, samples=samples, task="regression", noise=0.3)
    mean = x @ q.mean["weight"].T + q.mean["bias"]
    variance = x**2 @ q.variance["weight"].T + q.variance["bias"]
    z_mean = (found.mean - mean) / (variance / samples).sqrt()
    z_variance = (found.epistemic / variance - (samples - 1) / samples) * math.sqrt(samples / 2)
    assert float(z_mean.abs().max()) < 5
    assert float(z_variance.abs().max()) < 5
    assert torch.equal(found.aleatoric, torch.full((20, 1), 0.3).double())


@pytest.mark.parametrize("vectorise", [False, True, None])
def test_the_variance_is_that_of_the_mixture(vectorise: bool | None) -> None:
    model, q = linear(2)
    found = predict(
        model, q, rows().double() + 1e6, samples=11, task="regression", keep_samples=True, vectorise=vectorise
    )
    assert isinstance(found, RegressionPrediction)
    assert found.samples is not None
    assert found.samples.shape == (11, 6, 2)
    torch.testing.assert_close(found.mean, found.samples.mean(0))
    torch.testing.assert_close(found.epistemic, found.samples.var(0, correction=0))
    assert torch.equal(found.variance, found.epistemic)
    assert torch.equal(found.aleatoric, torch.zeros(6, 2).double())


def test_noise_per_output() -> None:
    model, q = linear(2)
    found = predict(model, q, rows().double(), task="regression", noise=torch.tensor([0.1, 0.2]))
    torch.testing.assert_close(
        found.aleatoric, torch.tensor([[0.1, 0.2]]).double().expand(6, 2), rtol=1e-6, atol=0
    )
    torch.testing.assert_close(found.variance, found.aleatoric + found.epistemic)


class Heteroscedastic(nn.Module):
    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.mean, self.log_variance = nn.Linear(4, 1), nn.Linear(4, 1)
        self.shared = nn.Parameter(torch.tensor(-1.0)) if shared else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.mean(x), self.log_variance(x) if self.shared is None else self.shared


@pytest.mark.parametrize("vectorise", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_learnt_noise_is_averaged_over_samples(shared: bool, vectorise: bool) -> None:
    model = Heteroscedastic(shared)
    mean = dict(model.named_parameters())
    q = DiagonalPosterior(mean, {name: torch.full_like(p, 0.1) for name, p in mean.items()})
    found = predict(model, q, rows(), samples=5, task="regression", noise="model", vectorise=vectorise)
    g, noises = generator(0), []
    for _ in range(5):
        log_variance = torch.func.functional_call(model, q.sample(g), (rows(),))[1]
        noises.append(log_variance.exp().expand(6, 1).detach())
    torch.testing.assert_close(found.aleatoric, torch.stack(noises).mean(0))


def test_one_dimensional_outputs_work() -> None:
    class Flat(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)[:, 0]

    model = Flat(4, 1)
    found = predict(model, "mean", rows(), task="regression")
    assert found.mean.shape == found.variance.shape == (6,)


@pytest.mark.parametrize(
    ("noise", "error"),
    [
        (-1.0, InvalidValue),
        (math.nan, InvalidValue),
        (torch.tensor([1.0, -1.0]), InvalidValue),
        (True, InvalidType),
        ("x", InvalidType),
    ],
)
def test_noise_that_makes_no_sense_is_refused(noise: object, error: type[Exception]) -> None:
    model, q = linear()
    with pytest.raises(error, match="noise"):
        predict(model, q, rows().double(), task="regression", noise=noise)  # type: ignore[call-overload]


def test_the_model_must_tell_its_noise_when_asked_to() -> None:
    model, q = linear()
    with pytest.raises(InvalidType, match="mean, log_variance"):
        predict(model, q, rows().double(), task="regression", noise="model")
