"""K-FAC and Noisy K-FAC against a dense replay, and where they come to rest."""

import pytest
import torch
from torch import nn

import credo
from credo.posterior import KroneckerPosterior, Layer, Root
from tests.optim.kronecker_replay import KroneckerReplay, factors_at
from tests.optim.replay import snapshot
from tests.optim.test_algorithm import batches, closure_for, network, some_posterior

BASE = {
    "lr": 0.05,
    "prior_precision": 2.0,
    "damping": 0.05,
    "momentum": 0.9,
    "ema_rate": 0.3,
    "damping_form": "pi",
    "factor_interval": 1,
    "inverse_interval": 1,
}
CASES = {
    "pi": {},
    "eigen": {"damping_form": "eigen"},
    "no momentum": {"momentum": 0.0},
    "tempered": {"tempering": 0.3},
    "strong prior": {"prior_precision": 40.0, "damping_form": "eigen"},
    "augmented": {"augmentation": 10.0},
    "sum loss": {"reduction": "sum"},
    "now and then": {"factor_interval": 3, "inverse_interval": 4},
}


def replay_for(options: dict, prior=None) -> KroneckerReplay:
    kinds = ("lr", "momentum", "ema_rate", "prior_precision", "damping")
    numbers = {kind: options[kind] for kind in kinds}
    given = None if prior is None else (prior.mean, {n: 1 / v for n, v in prior.variance.items()})
    size = 100 * options.get("augmentation", 1.0)
    tempering = options.get("tempering", 1.0)
    return KroneckerReplay(size, **numbers, tempering=tempering, form=options["damping_form"], prior=given)


def follow(method, options: dict, prior=None, steps: int = 9) -> None:
    options = BASE | options
    model, replay = network(), replay_for(options, prior)
    optimizer = method(model, data_size=100, prior=prior, **options)
    due = {1: range(steps), 3: (0, 1, 2, 3, 6), 4: (0, 1, 2, 4, 8)}
    for t, (x, y) in enumerate(batches(steps)):
        before, seen = snapshot(model), []
        optimizer.step(closure_for(optimizer, model, x, y, seen))
        assert len(seen) == options.get("mc_samples", 1)
        found = [factors_at(weights, x, y) for weights in seen]
        g = {name: sum(mean[name] for _, mean in found) / len(found) for name in before}
        factors = {
            layer: tuple(sum(own[layer][k] for own, _ in found) / len(found) for k in (0, 1))
            for layer in ("0", "2")
        }
        if t in due[options["factor_interval"]]:
            replay.learn(factors)
        if t in due[options["inverse_interval"]]:
            replay.invert()
        expected, posterior = replay.step(before, g), optimizer.posterior()
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.detach(), expected[name], rtol=1e-9, atol=1e-9)
        for layer in ("0", "2"):
            torch.testing.assert_close(
                optimizer.factors()[layer], replay.factors[layer], rtol=1e-9, atol=1e-12
            )
            covariance = posterior.dense_covariance(layer)
            torch.testing.assert_close(covariance, replay.covariance(layer), rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("method", [credo.KFAC, credo.NoisyKFAC])
def test_the_update_is_that_of_the_dense_replay(method, options):
    follow(method, options)


@pytest.mark.parametrize("form", ["pi", "eigen"])
def test_several_samples_and_a_posterior_as_prior(form):
    follow(credo.NoisyKFAC, {"mc_samples": 3, "damping_form": form})
    follow(credo.NoisyKFAC, {"damping_form": form}, prior=some_posterior())


def trained(method=credo.NoisyKFAC, data_size: int = 100, steps: int = 3, **options):
    model = network()
    optimizer = method(model, data_size=data_size, **options)
    for x, y in batches(steps):
        optimizer.step(closure_for(optimizer, model, x, y, []))
    return model, optimizer


@pytest.mark.parametrize("form", ["pi", "eigen"])
def test_blocks_draw_with_the_covariance_of_the_posterior(form):
    """20,000 draws: 20 blocks of a convolution with 1,000 groups that are all alike; |z| < 5 everywhere."""
    groups, conv = 1000, nn.Conv1d(3000, 2000, 1, groups=1000).double()
    generator = torch.Generator().manual_seed(1)
    one, weight, bias = (torch.randn(n, generator=generator).double() for n in ((16, 3, 1), (2, 3, 1), (2,)))
    with torch.no_grad():
        conv.weight.copy_(weight.repeat(groups, 1, 1))
        conv.bias.copy_(bias.repeat(groups))
    optimizer = credo.NoisyKFAC(conv, data_size=100, damping_form=form, lr=0.0)
    optimizer.step(lambda: conv(one.repeat(1, groups, 1)).square().sum((1, 2)))
    draws, n = [], 20 * groups
    for _ in range(20):
        with optimizer.sampled():
            matrices = torch.cat([conv.weight.view(groups, 2, 3), conv.bias.view(groups, 2, 1)], 2).detach()
            draws.append(matrices.transpose(1, 2).flatten(1))
    root = optimizer.posterior().layers[""].root
    first = Root(root.rows[0], root.columns[0], root.scale if form == "pi" else root.scale[0])
    truth = KroneckerPosterior(
        {"w": torch.zeros(2, 4).double()}, {"w": Layer("w", None, first)}, {}
    ).dense_covariance("w")
    away = torch.cat(draws) - torch.cat([weight[:, :, 0], bias[:, None]], 1).T.reshape(-1)
    spread = ((torch.outer(truth.diagonal(), truth.diagonal()) + truth.square()) / n).sqrt()
    assert float((away.mean(0) / (truth.diagonal() / n).sqrt()).abs().max()) < 5
    assert float(((away.T @ away / n - truth) / spread).abs().max()) < 5


@pytest.mark.parametrize("form", ["pi", "eigen"])
def test_twice_the_data_halve_the_covariance(form):
    """At prior_precision=0 and a given damping, where N enters nowhere else; lr=0, so that all see the same weights."""
    options = {"damping_form": form, "damping": 3e-2, "prior_precision": 0.0, "lr": 0.0, "steps": 1}
    one, two = (trained(data_size=n, **options)[1].posterior() for n in (1000, 2000))
    for layer in ("0", "2"):
        torch.testing.assert_close(
            one.dense_covariance(layer), 2 * two.dense_covariance(layer), rtol=1e-12, atol=0
        )


def correlated(n: int = 400):
    generator = torch.Generator().manual_seed(0)
    mixing = torch.tensor([[1.0, 0.8, 0.3], [0.0, 0.6, 0.4], [0.0, 0.0, 0.5]], dtype=torch.float64)
    x = torch.randn(n, 3, generator=generator, dtype=torch.float64) @ mixing
    truth = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    return x, x @ truth + torch.randn(n, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("fisher", ["empirical", "true"])
@pytest.mark.parametrize("tempering", [1.0, 0.5])
def test_linear_regression_has_the_exact_posterior(fisher, tempering):
    x, y = correlated()
    delta, model = 2.0, nn.Linear(3, 1, bias=False).double()
    options = {"damping": 0.0, "damping_form": "eigen", "momentum": 0.0, "ema_rate": 0.02, "fisher": fisher}
    optimizer = credo.NoisyKFAC(
        model,
        0.1,
        data_size=len(x),
        prior_precision=delta,
        tempering=tempering,
        factor_interval=1,
        inverse_interval=20,
        **options,
    )
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 / (1 + t / 50))

    def closure():
        optimizer.zero_grad()
        outputs = model(x)
        if fisher == "true":
            optimizer.observe(outputs, "gaussian")
        loss = 0.5 * (outputs[:, 0] - y).square().mean()
        loss.backward()
        return loss

    mean, steps = 0.0, 800
    for t in range(steps):
        optimizer.step(closure)
        rate.step()
        mean = mean + (model.weight.detach()[0] / (steps // 2) if t >= steps // 2 else 0.0)
    precision = x.T @ x / tempering + delta * torch.eye(3).double()
    ridge = torch.linalg.solve(precision, x.T @ y / tempering)
    sd = torch.linalg.inv(precision).diagonal().sqrt()
    mean_field = precision.diagonal().rsqrt()
    found = optimizer.posterior().variance["weight"][0].sqrt()
    assert float(((mean - ridge) / sd).abs().max()) < 0.1
    assert float((found / sd - 1).abs().max()) < 0.05
    assert float((mean_field / sd - 1).abs().min()) > 0.2  # what a diagonal posterior would say
