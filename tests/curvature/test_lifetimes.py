"""A backward pass frees what it has used, as torch's own does, also while the loss is still held."""

import weakref

import pytest
import torch
from torch import nn

import credo


def conv_net() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(32, 2)), (
        torch.randn(5, 1, 6, 6)
    )


def norm_net() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.PReLU(), nn.Linear(6, 2)), torch.randn(5, 4)


def remembered(model: nn.Module) -> list[weakref.ref[torch.Tensor]]:
    """References to the outputs of all layers but the last, that keep nothing alive."""
    found: list[weakref.ref[torch.Tensor]] = []
    for layer in list(model)[:-1]:  # type: ignore[arg-type]
        layer.register_forward_hook(lambda _, __, output: found.append(weakref.ref(output.untyped_storage())))
    return found


def in_a_capture(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with credo.capture(model):
        loss = model(x).square().sum(1).mean()
        loss.backward()
        return loss


def with_vogn(model: nn.Module, x: torch.Tensor, **options: object) -> torch.Tensor:
    optimizer = credo.VOGN(model, data_size=10, initial_curvature=1.0, **options)
    with optimizer.sampled():
        loss = model(x).square().sum(1).mean()
        loss.backward()
        return loss


def with_slices(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return with_vogn(model, x, mc_slices=2)


def with_factors(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    optimizer = credo.NoisyKFAC(model, data_size=10)
    with optimizer.sampled():
        loss = model(x).square().sum(1).mean()
        loss.backward()
        return loss


@pytest.mark.parametrize("run", [in_a_capture, with_vogn, with_slices, with_factors])
@pytest.mark.parametrize("build", [conv_net, norm_net])
def test_activations_are_free_after_the_backward_pass(build, run):
    model, x = build()
    outputs = remembered(model)
    loss = run(model, x)
    assert outputs
    assert loss.grad_fn is not None
    assert [k for k, output in enumerate(outputs) if output() is not None] == []
