"""The damping and the learning rate that methods take by themselves."""

import math

import pytest
import torch

import credo

METHODS = [(credo.VOGN, 1), (credo.OGN, 1), (credo.KFAC, 2), (credo.NoisyKFAC, 2)]  # with α·20/γ


def numbers(method, **given):
    group = method(torch.nn.Linear(2, 2), **given).param_groups[0]
    return group["lr"], group["damping"]


@pytest.mark.parametrize(("method", "step"), METHODS)
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"data_size": 300}, (0.05, 1.0)),
        ({"data_size": 100, "augmentation": 3.0}, (0.05, 1.0)),
        ({"data_size": 50_000}, (1.5e-3, 3e-2)),
        ({"data_size": 300, "lr": 0.1}, (0.1, 1.0)),
        ({"data_size": 300, "damping": 0.2}, (0.01, 0.2)),
        ({"data_size": 300, "damping": 0.0, "lr": 0.1}, (0.1, 0.0)),
        ({"data_size": 300, "damping": 0.0}, (0.05, 0.0)),
    ],
)
def test_the_rule(method, step, given, expected):
    lr, damping = expected
    lr = lr if "lr" in given else step * lr
    assert numbers(method, **given) == pytest.approx((lr, damping), rel=1e-12)


@pytest.mark.parametrize("data_size", [1, 30, 1000, 10**6])
def test_the_noise_is_never_larger_than_the_rule_says(data_size):
    model = torch.nn.Linear(3, 2)
    optimizer = credo.VOGN(model, data_size=data_size, initial_curvature=1e-12)
    assert max(v.max().sqrt().item() for v in optimizer.posterior().variance.values()) <= 1 / math.sqrt(300)


@pytest.mark.parametrize("method", [method for method, _ in METHODS])
def test_few_data_are_learnt_with_the_defaults(method):
    """30 examples of two classes: at a damping of 0.03 the noise, sd 1, would drown everything."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, 5, generator=generator)
    y = (x[:, 0] > 0).long()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(5, 20), torch.nn.Tanh(), torch.nn.Linear(20, 2))
    optimizer = method(model, data_size=30)
    for _ in range(300):
        optimizer.step(lambda: torch.nn.functional.cross_entropy(model(x), y, reduction="none"))
    prediction = credo.predict(model, optimizer.posterior(), x, samples=20)
    assert credo.evaluate(prediction, y)["accuracy"] > 0.95
