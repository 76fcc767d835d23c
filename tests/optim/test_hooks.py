"""Hooks and the profiler find a step, though it asks for neither when there is none."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tests.optim.trained import METHODS, X, Y


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(X.shape[1], 3)


def losses(model: nn.Module):
    return lambda: F.cross_entropy(model(X), Y, reduction="none")


@pytest.mark.parametrize("method", METHODS)
def test_hooks_of_all_optimisers_run_too_and_may_replace_the_closure(method):
    model, seen = network(), []
    optimizer = method(model, data_size=100)
    handles = [
        register_optimizer_step_pre_hook(
            lambda own, *_: ((own, losses(model)), {}) if own is optimizer else None
        ),
        register_optimizer_step_post_hook(lambda *_: seen.append("after")),
    ]
    try:
        assert optimizer.step(None) is not None
    finally:
        for handle in handles:
            handle.remove()
    assert seen
    seen.clear()
    optimizer.step(losses(model))
    assert not seen


@pytest.mark.parametrize("method", METHODS)
def test_hooks_run_once_around_the_step_of_a_subclass(method):
    class Counting(method):
        def step(self, closure=None):
            return super().step(closure)

    model, seen = network(), []
    optimizer = Counting(model, data_size=100)
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    optimizer.step(losses(model))
    assert seen == ["after"]


@pytest.mark.parametrize("method", METHODS)
def test_a_profiler_sees_the_step_by_its_name(method):
    model = network()
    optimizer = method(model, data_size=100)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.zero_grad()
        optimizer.step(losses(model))
    names = {event.key for event in profile.key_averages()}
    assert {
        f"Optimizer.step#{method.__name__}.step",
        f"Optimizer.zero_grad#{method.__name__}.zero_grad",
    } <= names
