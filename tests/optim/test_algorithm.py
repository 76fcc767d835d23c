"""The updates against Algorithm 1 replayed from the samples that a closure saw."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import credo
from tests.optim.replay import Replay, means_over_examples, snapshot

CASES = {
    "one sample": {"mc_samples": 1},
    "three samples": {"mc_samples": 3},
    "no momentum": {"momentum": 0.0},
    "tempered": {"tempering": 0.3, "mc_samples": 2},
    "damped": {"damping": 0.5},
    "strong prior": {"prior_precision": 40.0},
    "augmented": {"augmentation": 10.0},
    "given curvature": {"initial_curvature": 0.7, "mc_samples": 3},
    "almost no memory": {"ema_rate": 0.999},
    "sum loss": {"reduction": "sum"},
}


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def batches(count: int, size: int = 7):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        x = torch.randn(size, 4, generator=generator, dtype=torch.float64)
        yield x, torch.randint(0, 3, (size,), generator=generator)


def closure_for(optimizer, model, x, y, seen):
    def closure():
        seen.append(snapshot(model))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y, reduction=optimizer.settings["reduction"])
        loss.backward()
        return loss

    return closure


def replay_for(options: dict, prior: credo.DiagonalPosterior | None = None) -> Replay:
    settings = {
        "lr": 0.05,
        "momentum": 0.9,
        "ema_rate": 0.1,
        "prior_precision": 2.0,
        "damping": 0.05,
        "tempering": 1.0,
    }
    settings |= {key: value for key, value in options.items() if key in settings}
    replay = Replay(data_size=100 * options.get("augmentation", 1.0), **settings)
    if prior is not None:
        replay.prior_mean = prior.mean
        replay.precisions = {name: 1 / v for name, v in prior.variance.items()}
    return replay


def follow(method, options: dict, prior=None, kernels: str | None = None, steps: int = 5) -> None:
    """Trains, replays, and compares mean, momentum, curvature and variance after every step."""
    model, replay = network(), replay_for(options, prior)
    base = {"lr": 0.05, "prior_precision": 2.0, "damping": 0.05, "momentum": 0.9, "ema_rate": 0.1}
    optimizer = method(model, data_size=100, prior=prior, **(base | options))
    if "initial_curvature" in options:
        replay.s = {
            name: torch.full_like(p, options["initial_curvature"]) for name, p in model.named_parameters()
        }
    for x, y in batches(steps):
        before, seen = snapshot(model), []
        optimizer.step(closure_for(optimizer, model, x, y, seen))
        assert len(seen) == options.get("mc_samples", 1)
        g, h = means_over_examples(
            model, seen, lambda net, i, x=x, y=y: F.cross_entropy(net(x[i : i + 1]), y[i : i + 1]), 7
        )
        expected = replay.step(before, g, h)
        variance = optimizer.posterior().variance
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.detach(), expected[name], rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(optimizer.state[p]["momentum"], replay.m[name], rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(optimizer.curvature()[name], replay.s[name], rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(variance[name], replay.variance(name), rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_vogn_is_algorithm_1(options, both_kernels):
    follow(credo.VOGN, options)


@pytest.mark.parametrize("options", [o for o in CASES.values() if "mc_samples" not in o])
def test_ogn_is_the_same_at_the_mean(options, both_kernels):
    follow(credo.OGN, options)


def some_posterior() -> credo.DiagonalPosterior:
    generator = torch.Generator().manual_seed(9)
    mean = {
        n: torch.randn(p.shape, generator=generator, dtype=p.dtype) for n, p in network().named_parameters()
    }
    variance = {
        n: torch.rand(p.shape, generator=generator, dtype=p.dtype) + 0.1
        for n, p in network().named_parameters()
    }
    return credo.DiagonalPosterior(mean, variance)


def test_a_posterior_as_prior_has_its_own_mean_and_precisions(both_kernels):
    follow(credo.VOGN, {"mc_samples": 2}, prior=some_posterior())


def test_ogn_blocks_hold_the_mean_and_vogn_blocks_a_sample():
    for method, noisy in ((credo.OGN, False), (credo.VOGN, True)):
        model = network()
        optimizer = method(model, data_size=100, initial_curvature=1.0)
        mean = snapshot(model)
        with optimizer.sampled():
            inside = snapshot(model)
        assert any(not torch.equal(inside[n], mean[n]) for n in mean) == noisy
        assert all(torch.equal(p, mean[n]) for n, p in model.named_parameters())


def test_samples_have_the_posteriors_moments():
    """20,000 draws of a few weights: z-scores of mean and variance below 5."""
    layer = nn.Linear(2, 2).double()
    optimizer = credo.VOGN(layer, data_size=50, initial_curvature=0.3, prior_precision=3.0, damping=0.1)
    mean = layer.weight.detach().clone()
    draws = []
    for _ in range(20_000):
        with optimizer.sampled():
            draws.append(layer.weight.detach().clone())
    stacked, variance = torch.stack(draws), optimizer.posterior().variance["weight"]
    n = len(draws)
    assert ((stacked.mean(0) - mean) / (variance / n).sqrt()).abs().max() < 5
    assert ((stacked.var(0) - variance) / (variance * (2 / n) ** 0.5)).abs().max() < 5


def test_augmentation_is_a_scaling_of_the_data_size():
    results = []
    for options in ({"data_size": 1000}, {"data_size": 100, "augmentation": 10.0}):
        model = network()
        optimizer = credo.VOGN(model, **options)
        for x, y in batches(4):
            optimizer.step(closure_for(optimizer, model, x, y, []))
        results.append((snapshot(model), optimizer.posterior().variance))
    for first, second in zip(*results, strict=True):
        for name in first:
            torch.testing.assert_close(first[name], second[name], rtol=1e-12, atol=0)


def test_with_very_many_data_vogn_is_ogn():
    means = []
    for method in (credo.VOGN, credo.OGN):
        model = network()
        optimizer = method(model, data_size=10**14)
        for x, y in batches(6):
            optimizer.step(closure_for(optimizer, model, x, y, []))
        means.append(snapshot(model))
    for name in means[0]:
        torch.testing.assert_close(means[0][name], means[1][name], rtol=1e-4, atol=1e-5)


def test_by_hand_and_by_closure_are_the_same_bit_for_bit():
    trained = []
    for by_hand in (False, True):
        model = network()
        optimizer = credo.VOGN(model, data_size=100, mc_samples=2)
        for x, y in batches(4):
            if by_hand:
                for _ in range(2):
                    with optimizer.sampled():
                        F.cross_entropy(model(x), y).backward()
                optimizer.step()
            else:
                optimizer.step(closure_for(optimizer, model, x, y, []))
        trained.append(snapshot(model))
    assert all(torch.equal(trained[0][name], trained[1][name]) for name in trained[0])


def test_a_closure_may_return_the_losses_of_the_examples():
    trained = []
    for own_backward in (True, False):
        model = network()
        optimizer = credo.VOGN(model, data_size=100, mc_samples=2)
        for x, y in batches(4):
            if own_backward:
                loss = optimizer.step(closure_for(optimizer, model, x, y, []))
            else:
                loss = optimizer.step(
                    lambda x=x, y=y, net=model: F.cross_entropy(net(x), y, reduction="none")
                )
        trained.append((snapshot(model), loss))
    torch.testing.assert_close(trained[0], trained[1], rtol=1e-12, atol=1e-14)


def test_micro_batches_in_one_block_are_one_batch():
    trained = []
    for parts in ([slice(0, 7)], [slice(0, 2), slice(2, 3), slice(3, 7)]):
        model = network()
        optimizer = credo.VOGN(model, data_size=100)
        for x, y in batches(4):
            with optimizer.sampled():
                for part in parts:
                    (F.cross_entropy(model(x[part]), y[part], reduction="sum") / 7).backward()
            optimizer.step()
        trained.append(snapshot(model))
    torch.testing.assert_close(trained[0], trained[1], rtol=1e-11, atol=1e-12)
