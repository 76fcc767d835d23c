"""A model in the middle of its training, and whether a refused call has left it alone."""

import torch
import torch.nn.functional as F
from torch import nn

import credo
from tests.optim.replay import snapshot

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 2, 0, 1, 2])
NAMES = [name for name in credo.optim.__all__ if hasattr(getattr(credo.optim, name), "posterior")]
METHODS = [
    getattr(credo, name) for name in NAMES if name != "BayesianOptimizer"
]  # a new one is in it by its export


def trained(method=credo.VOGN, **options):
    """A model and an optimiser after two steps."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = method(model, data_size=60, **options)
    for _ in range(2):
        optimizer.step(lambda: F.cross_entropy(model(X), Y, reduction="none"))
    return model, optimizer


def learned(model, optimizer) -> dict:
    """Everything that a refused call must leave alone."""
    state = {
        f"{k}.{name}": v.clone()
        for k, p in enumerate(optimizer.state)
        for name, v in optimizer.state[p].items()
    }
    return {**snapshot(model), **state, "step": torch.tensor(optimizer.counters["step"])}


def assert_unchanged(before: dict, model, optimizer) -> None:
    after = learned(model, optimizer)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
