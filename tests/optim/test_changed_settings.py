"""Options that schedulers or hands put into parameter groups after the optimiser was built."""

import math

import pytest
import torch
from torch import nn

import credo
from credo.errors import CredoError
from tests.optim import trained

METHODS = [method.__name__ for method in trained.METHODS]


def built(method, **settings):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = getattr(credo, method)(model, data_size=20, **settings)
    return model, optimizer, lambda: model(torch.ones(4, 3)).square().sum(1).mean()


@pytest.mark.parametrize("lr", [math.nan, math.inf, -0.1, "0.1", None, torch.tensor(math.nan)])
@pytest.mark.parametrize("method", METHODS)
def test_a_learning_rate_out_of_range_is_refused_at_the_step(method, lr):
    model, optimizer, closure = built(method)
    optimizer.step(closure)
    before = [p.clone() for p in model.parameters()]
    kept, optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"], lr
    with pytest.raises(CredoError, match="lr must"):
        optimizer.step(closure)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    optimizer.param_groups[0]["lr"] = kept
    optimizer.step(closure)
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_tensor_that_is_changed_in_place_is_looked_at_again():
    _, optimizer, closure = built("VOGN", lr=torch.tensor(0.1))
    optimizer.step(closure)
    optimizer.param_groups[0]["lr"].fill_(math.nan)
    with pytest.raises(CredoError, match="lr must"):
        optimizer.step(closure)


@pytest.mark.parametrize(("name", "value"), [("momentum", 1.5), ("damping", math.nan), ("ema_rate", -1)])
def test_other_options_out_of_range_are_refused(name, value):
    _, optimizer, closure = built("VOGN", damping=0.1)
    optimizer.param_groups[0][name] = value
    with pytest.raises(CredoError, match=f"{name} must"):
        optimizer.step(closure)


def test_a_schedule_may_round_to_just_below_zero():
    _, optimizer, closure = built("VOGN")
    optimizer.param_groups[0]["lr"] = -1e-18
    optimizer.step(closure)


def test_schedulers_of_torch_stay_in_range():
    for schedule in (
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 5),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=30),
        lambda o: torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.0, 5),
    ):
        _, optimizer, closure = built("VOGN")
        scheduler = schedule(optimizer)
        for _ in range(20):
            optimizer.step(closure)
            scheduler.step()
