"""IVON against its equations, replayed from the weights that a closure saw, and where it comes to rest."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import credo
from tests.optim.replay import clone_with, snapshot

CASES = {
    "one sample": {},
    "three samples": {"mc_samples": 3},
    "tempered": {"tempering": 0.3, "mc_samples": 3},
    "strong prior": {"prior_precision": 40.0},
    "no prior": {"prior_precision": 0.0},
    "augmented": {"augmentation": 10.0},
    "quick": {"betas": (0.0, 0.5)},
    "clipped": {"clip_radius": 1e-2, "mc_samples": 2},
    "sum loss": {"reduction": "sum", "mc_samples": 2},
}


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def batches(count: int):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        x = torch.randn(7, 4, generator=generator, dtype=torch.float64)
        yield x, torch.randint(0, 3, (7,), generator=generator)


def some_posterior() -> credo.DiagonalPosterior:
    generator = torch.Generator().manual_seed(9)
    named = dict(network().named_parameters())
    mean = {n: torch.randn(p.shape, generator=generator, dtype=p.dtype) for n, p in named.items()}
    variance = {n: torch.rand(p.shape, generator=generator, dtype=p.dtype) + 0.1 for n, p in named.items()}
    return credo.DiagonalPosterior(mean, variance)


def follow(options: dict, prior: credo.DiagonalPosterior | None = None) -> None:
    """m, h and μ by the equations, element by element, beside the optimiser's."""
    settings = {"betas": (0.9, 0.95), "prior_precision": 2.0, **options}
    model = network()
    optimizer = credo.IVON(model, 0.1, data_size=100, initial_curvature=0.7, prior=prior, **settings)
    (b1, b2), tau = settings["betas"], settings.get("tempering", 1.0)
    lam, radius = 100 * settings.get("augmentation", 1.0) / tau, settings.get("clip_radius", float("inf"))
    m = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    h = {n: torch.full_like(p, 0.7) for n, p in model.named_parameters()}
    for t, (x, y) in enumerate(batches(6), start=1):
        mean, seen = snapshot(model), []

        def closure(x=x, y=y, seen=seen) -> Tensor:
            seen.append(snapshot(model))
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y, reduction=optimizer.settings["reduction"])
            loss.backward()
            return loss

        optimizer.step(closure)
        assert len(seen) == settings.get("mc_samples", 1)
        nets = [clone_with(model, weights) for weights in seen]
        grads = [torch.autograd.grad(F.cross_entropy(net(x), y), list(net.parameters())) for net in nets]
        for k, (n, p) in enumerate(model.named_parameters()):
            delta = (settings["prior_precision"] if prior is None else 1 / prior.variance[n]) / lam
            variance = 1 / (lam * (h[n] + delta))
            g = sum(own[k] for own in grads) / len(seen)
            curvature = sum(
                own[k] * (w[n] - mean[n]) / variance for own, w in zip(grads, seen, strict=True)
            ) / len(seen)
            m[n] = b1 * m[n] + (1 - b1) * g
            h[n] = (
                b2 * h[n]
                + (1 - b2) * curvature
                + 0.5 * (1 - b2) ** 2 * (h[n] - curvature) ** 2 / (h[n] + delta)
            )
            pull = delta * (mean[n] - (0.0 if prior is None else prior.mean[n]))
            step = (m[n] / (1 - b1**t) + pull) / (h[n] + delta)
            expected = mean[n] - 0.1 * step.clamp(-radius, radius)
            torch.testing.assert_close(p.detach(), expected, rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(optimizer.state[p]["momentum"], m[n], rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(optimizer.curvature()[n], h[n], rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(
                optimizer.posterior().variance[n], 1 / (lam * (h[n] + delta)), rtol=1e-9, atol=1e-12
            )


@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_ivon_follows_its_equations(options, both_kernels):
    follow(options)


def test_a_posterior_as_prior_has_its_own_mean_and_precisions(both_kernels):
    follow({"mc_samples": 2}, prior=some_posterior())


@pytest.mark.parametrize("tempering", [1.0, 0.5])
def test_linear_regression_reaches_the_mean_field_optimum(tempering):
    """The mean is the ridge solution, the precision Σx²/τ + δ; averaged over a hundred outputs that want the same."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 3, generator=generator, dtype=torch.float64)
    y = x @ torch.tensor([1.0, -2.0, 0.5]).double() + torch.randn(
        60, generator=generator, dtype=torch.float64
    )
    model = nn.Linear(3, 100, bias=False).double()
    options = {"betas": (0.9, 0.998), "prior_precision": 2.0, "initial_curvature": 1.0}
    optimizer = credo.IVON(model, data_size=60, tempering=tempering, **options)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 / (1 + t / 200))
    mean, curvature, steps = 0.0, 0.0, 2500
    for t in range(steps):
        optimizer.step(lambda: 0.5 * (model(x) - y[:, None]).square().sum(1))
        rate.step()
        if t >= 1500:
            mean = mean + model.weight.detach().mean(0) / (steps - 1500)
            curvature = curvature + optimizer.curvature()["weight"].mean(0) / (steps - 1500)
    ridge = torch.linalg.solve(x.T @ x + tempering * 2.0 * torch.eye(3).double(), x.T @ y)
    torch.testing.assert_close(mean, ridge, rtol=0.03, atol=0)
    precision = x.square().sum(0) / tempering + 2.0
    torch.testing.assert_close(60 * curvature / tempering + 2.0, precision, rtol=0.03, atol=0)


def test_normalisation_layers_move_like_sgd_with_momentum():
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    optimizer = credo.IVON(model, 0.1, data_size=100, initial_curvature=0.5)
    before = model[1].weight.detach().clone()
    (x, y) = next(batches(1))
    with optimizer.sampled():
        F.cross_entropy(model(x), y).backward()
    gradient = model[1].weight.grad.clone()
    optimizer.step()
    torch.testing.assert_close(model[1].weight.detach(), before - 0.1 / 0.5 * gradient)
    assert optimizer.posterior().deterministic == {"1.weight", "1.bias"}
    assert bool((optimizer.state[model[1].weight]["curvature"] == 0.5).all())


def test_a_parameter_that_joins_later_has_a_step_count_of_its_own():
    model, extra = network(), nn.Linear(3, 3).double()
    optimizer = credo.IVON(model, 0.1, data_size=100)
    for x, y in batches(3):
        optimizer.step(lambda x=x, y=y: F.cross_entropy(model(x), y, reduction="none"))
    optimizer.add_param_group({"params": [(f"extra.{n}", p) for n, p in extra.named_parameters()]})
    (x, y) = next(batches(1))
    optimizer.step(lambda: F.cross_entropy(extra(model(x)), y, reduction="none"))
    assert int(optimizer.state[model[0].weight]["step"]) == 4
    assert int(optimizer.state[extra.weight]["step"]) == 1


def fail_after_backward(optimizer, model, x, y) -> None:
    with optimizer.sampled():
        F.cross_entropy(model(x), y).backward()
        raise ZeroDivisionError


def test_an_exception_in_the_second_block_leaves_the_first_as_it_was():
    results = []
    for fails in (False, True):
        model = network()
        optimizer = credo.IVON(model, 0.1, data_size=100, mc_samples=2, betas=(0.9, 0.9))
        (x, y) = next(batches(1))
        with optimizer.sampled():
            F.cross_entropy(model(x), y).backward()
        if fails:
            with pytest.raises(ZeroDivisionError):
                fail_after_backward(optimizer, model, x, y)
        with optimizer.sampled():
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        results.append((snapshot(model), optimizer.curvature()))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


def test_variances_stay_positive_and_finite_at_the_edge_of_float32(both_kernels):
    model = nn.Linear(4, 3)
    optimizer = credo.IVON(model, 1e-30, data_size=100, betas=(0.9, 0.5))
    for factor in (1e8, 1e14, 1e17, 1e18):
        optimizer.step(lambda factor=factor: model(torch.ones(2, 4)).sum(1) * factor)
        variance = optimizer.posterior().variance["weight"]
        assert bool((variance > 0).all())
        assert bool(variance.isfinite().all())


def test_where_the_examples_cannot_be_counted_only_a_sum_is_refused():
    class Free(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.weight).sum(1)

    model = Free()
    optimizer = credo.IVON(model, data_size=100)
    optimizer.step(lambda: model(torch.ones(5, 3)).square())
    assert optimizer.counters["step"] == 1
    summed = credo.IVON(model, data_size=100, reduction="sum")
    summed.zero_grad()
    with pytest.raises(credo.errors.UnsupportedOperation, match="number of examples"):
        summed.step(lambda: model(torch.ones(5, 3)).square())
