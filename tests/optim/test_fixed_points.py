"""Where VOGN comes to rest, against closed forms and quadrature."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import credo

DELTA = 2.0


def regression(n: int = 60):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 3, generator=generator, dtype=torch.float64) @ torch.tensor(
        [[1.0, 0.6, 0.0], [0.0, 1.0, 0.3], [0.0, 0.0, 0.7]], dtype=torch.float64
    )
    truth = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    return x, x @ truth + torch.randn(n, generator=generator, dtype=torch.float64)


def settle(model: nn.Module, losses, data_size: int, tempering: float, steps: int = 4000, **options):
    """Trains on the whole data with a falling step, and averages mean and curvature over the last half."""
    options = {
        "lr": 0.1,
        "momentum": 0.0,
        "ema_rate": 0.02,
        "damping": 0.0,
        "prior_precision": DELTA,
        **options,
    }
    optimizer = credo.VOGN(model, data_size=data_size, tempering=tempering, mc_samples=2, **options)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 / (1 + t / 200))
    mean, curvature = 0.0, 0.0
    for t in range(steps):
        optimizer.step(lambda: losses(model))
        rate.step()
        if t >= steps // 2:
            mean = mean + next(model.parameters()).detach().flatten() / (steps - steps // 2)
            curvature = curvature + optimizer.curvature()[
                next(iter(optimizer.names().values()))
            ].flatten() / (steps - steps // 2)
    return mean, curvature


@pytest.mark.parametrize("tempering", [1.0, 0.5, 0.1])
def test_linear_regression(tempering):
    x, y = regression()
    n = len(x)
    model = nn.Linear(3, 1, bias=False).double()
    mean, s = settle(model, lambda net: 0.5 * (net(x)[:, 0] - y).square(), n, tempering)

    ridge = torch.linalg.solve(x.T @ x + tempering * DELTA * torch.eye(3).double(), x.T @ y)
    precision = n * s / tempering + DELTA
    sd = precision.rsqrt()
    assert ((mean - ridge) / sd).abs().max() < 0.1

    # S* = N·h/τ + δ with h = E_q[gᵢ²] in closed form: residual² plus the spread of the prediction, times x².
    spread = x.square() @ sd.square()
    h = (((x @ mean - y).square() + spread)[:, None] * x.square()).mean(0)
    torch.testing.assert_close(precision, n * h / tempering + DELTA, rtol=0.03, atol=0)


def logistic_fixed_point(x: np.ndarray, y: np.ndarray, tempering: float) -> tuple[float, float]:
    """Solves Σ E_q[gᵢ] + τδμ = 0 and 1/σ² = Σ E_q[gᵢ²]/τ + δ for one weight, by Gauss–Hermite quadrature."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    weights = weights / weights.sum()
    mu, var = 0.0, 0.1
    for _ in range(2000):
        w = mu + np.sqrt(var) * nodes
        g = (1 / (1 + np.exp(-np.outer(x, w))) - y[:, None]) * x[:, None]
        gradient = (g @ weights).sum() + tempering * DELTA * mu
        precision = ((g**2) @ weights).sum() / tempering + DELTA
        mu, var = mu - 0.2 * gradient / (tempering * precision), 0.8 * var + 0.2 / precision
    return float(mu), float(var)


@pytest.mark.parametrize("tempering", [1.0, 0.5])
def test_logistic_regression_against_quadrature(tempering):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(40, generator=generator, dtype=torch.float64)
    y = (torch.rand(40, generator=generator, dtype=torch.float64) < torch.sigmoid(1.5 * x)).double()
    mu, var = logistic_fixed_point(x.numpy(), y.numpy(), tempering)

    def losses(net: nn.Module) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(net(x[:, None])[:, 0], y, reduction="none")

    mean, s = settle(nn.Linear(1, 1, bias=False).double(), losses, 40, tempering)
    variance = 1 / (40 * s / tempering + DELTA)
    assert abs(float(mean) - mu) < 0.1 * var**0.5
    assert abs(float(variance) / var - 1) < 0.03


def test_the_papers_example_of_the_precision():
    """N = 1000, δ = 50, h = 0.2, τ = 0.5: the precision is 450, not the 425 of the misprint."""
    model = nn.Linear(1, 1, bias=False).double()
    optimizer = credo.OGN(
        model, data_size=1000, prior_precision=50.0, tempering=0.5, damping=0.0, initial_curvature=0.2
    )
    assert float(1 / optimizer.posterior().variance["weight"]) == pytest.approx(450.0, rel=1e-12)
