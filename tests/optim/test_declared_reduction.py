"""Methods without squares also notice a sum that is declared a mean, and a mean that is declared a sum."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import credo
from credo.errors import UnsupportedOperation

X, Y = torch.ones(6, 4), torch.arange(6) % 3
SUMS = {
    "cross-entropy": lambda z: F.cross_entropy(z, Y, reduction="sum"),
    "squares": lambda z: F.mse_loss(z, torch.ones(6, 3), reduction="sum"),
    "sum of losses": lambda z: F.cross_entropy(z, Y, reduction="none").sum(),
}
MEANS = {
    "cross-entropy": lambda z: F.cross_entropy(z, Y),
    "squares": lambda z: F.mse_loss(z, torch.ones(6, 3)),
    "mean of losses": lambda z: F.cross_entropy(z, Y, reduction="none").mean(),
    "mean by hand": lambda z: (z - 1).square().mean(),
}


def built(method, reduction):
    model = nn.Linear(4, 3)
    return model, getattr(credo, method)(model, data_size=20, reduction=reduction)


@pytest.mark.parametrize("loss", SUMS.values(), ids=SUMS)
@pytest.mark.parametrize("method", ["IVON", "BayesByBackprop", "VOGN"])
def test_a_sum_is_no_mean(method, loss):
    model, optimizer = built(method, "mean")
    before = model.weight.clone()
    with pytest.raises(UnsupportedOperation, match=r"reduction='mean' is declared.*sums the losses of 6"):
        optimizer.step(lambda: loss(model(X)))
    assert torch.equal(model.weight, before)
    model, optimizer = built(method, "sum")
    optimizer.step(lambda: loss(model(X)))


@pytest.mark.parametrize("loss", MEANS.values(), ids=MEANS)
@pytest.mark.parametrize("method", ["IVON", "BayesByBackprop", "VOGN"])
def test_a_mean_is_no_sum(method, loss):
    model, optimizer = built(method, "sum")
    with pytest.raises(UnsupportedOperation, match="reduction='sum' is declared"):
        optimizer.step(lambda: loss(model(X)))


@pytest.mark.parametrize("method", ["IVON", "BayesByBackprop"])
def test_what_is_not_certain_is_taken(method):
    model, optimizer = built(method, "mean")
    weights = torch.ones(6) / 6
    optimizer.step(lambda: (weights * F.cross_entropy(model(X), Y, reduction="none")).sum())
    optimizer.step(lambda: F.cross_entropy(model(X), Y, reduction="sum") / 6)
    optimizer.step(lambda: F.cross_entropy(model(X[:1]), Y[:1], reduction="sum"))
