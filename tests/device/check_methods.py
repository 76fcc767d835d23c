"""All methods in all forms on the device, against the CPU: the same numbers, samples included, and nothing mixed.

On the CPU the samples are drawn by the function that draws them on the device, and the rest by plain torch.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import credo
from benchmarks.golden import FORMS, METHODS
from credo.kernels import accelerator_noise, noise
from credo.kernels.outputs import TINY
from credo.optim import local_reparameterisation
from tests.device.emulated import Device

STEPS, BATCH, DATA = 5, 6, 60


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def convolutional() -> nn.Module:
    """Without a bias before BatchNorm: its gradient is rounding alone, and a step relative to it is noise."""
    layers = (
        nn.Conv2d(2, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 3, 2, stride=2),
    )
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(12, 3))


MODELS = {"mlp": (mlp, (4,)), "conv": (convolutional, (2, 4, 4))}
CASES = [(method, form, "mlp") for form, how in FORMS.items() for method in how.methods]
CASES += [(method, form, "conv") for form in ("closure", "prior") for method in METHODS]
# Eigenvectors have no sign of their own, and samples follow it.
CASES = [case for case in CASES if case[0] != "NoisyKFAC" or case[1] == "pi"]


@contextmanager
def numbers_of_the_device() -> Iterator[None]:
    """On the CPU: samples as on the device."""

    def sample(rows, scale, shift, seed, stream, indices, starts):
        assert not any(starts)  # no piece of a longer tensor is drawn on the device by this function
        weights, means, curvatures, *shifts = rows
        count = len(weights)
        scales, numbers = noise.tensors.each(scale, count), noise.tensors.each(shift, count)
        given = shifts[0] if shifts else numbers
        means = weights if means[0] is weights[0] else means
        accelerator_noise.sample(weights, means, curvatures, scales, given, seed, stream, indices)

    def perturb(mean, variance, seed, stream, index):
        with torch.no_grad():
            accelerator_noise.perturb(mean, variance, seed, stream, index, TINY)

    with (
        credo.kernels.forced("off"),
        patch.object(noise, "_sample_reference", sample),
        patch.object(local_reparameterisation.outputs, "perturb_", perturb),
    ):
        yield


def train(method: str, form: str, name: str, device: str) -> dict[str, Tensor]:
    """What is learned, the posterior, its draws, and the state, on the CPU."""
    how, (build, shape) = FORMS[form], MODELS[name]
    generator = torch.Generator().manual_seed(1)
    model = build().double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.5 * torch.randn(p.shape, generator=generator, dtype=torch.float64))
    model.to(device)
    options = dict(how.options)
    if how.prior:
        named = {key: p.detach().clone() for key, p in model.named_parameters()}
        variance = {key: 0.1 + p.square() for key, p in named.items()}
        options["prior"] = credo.DiagonalPosterior({key: p / 2 for key, p in named.items()}, variance, {})
    params = model
    if how.groups:
        rows = list(model.named_parameters())
        params = [{"params": rows[:2], "lr": 0.02}, {"params": rows[2:], "deterministic": True}]
    optimizer = getattr(credo, method)(params, data_size=DATA, **options)
    if how.accumulate > 1:
        optimizer.accumulate(how.accumulate)
    reduction = "none" if how.losses else options.get("reduction", "mean")
    losses = []
    for _ in range(STEPS):
        x = torch.randn(BATCH, *shape, generator=generator, dtype=torch.float64).to(device)
        y = torch.randint(0, 3, (BATCH,), generator=generator).to(device)

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y, reduction=reduction)
            if reduction != "none":
                loss.backward()
            return loss

        if how.block:
            optimizer.zero_grad()
            for _ in range(options.get("mc_samples", 1)):
                with optimizer.sampled():
                    F.cross_entropy(model(x), y).backward()
            optimizer.step()
        else:
            losses.append(optimizer.step(closure).cpu())
    posterior = optimizer.posterior()
    generator = torch.Generator(device)
    generator.manual_seed(3)
    draw = posterior.sample(generator)
    found = {f"mean.{key}": value for key, value in posterior.mean.items()}
    found |= {f"variance.{key}": value for key, value in posterior.variance.items()}
    found |= {f"draw.{key}": value for key, value in draw.items()}
    found |= {f"buffer.{key}": value for key, value in model.named_buffers() if value.is_floating_point()}
    found |= {f"loss.{k}": loss for k, loss in enumerate(losses)}
    for k, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        state = optimizer.state[p]
        found |= {f"{k}.{key}": v for key, v in state.items() if isinstance(v, Tensor) and v.dim()}
    assert optimizer.counters["refused"] == 0
    return {key: value.detach().cpu() for key, value in found.items()}


@pytest.mark.parametrize(("method", "form", "name"), CASES)
def test_numbers_are_those_of_the_cpu(method, form, name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Device() as seen:
            found = train(method, form, name, "npu:0")
        with numbers_of_the_device():
            truth = train(method, form, name, "cpu")
    assert found.keys() == truth.keys()
    for key, value in truth.items():
        if "root" in key or "basis" in key:  # eigenvectors have no sign of their own
            continue
        error = (found[key] - value).abs().max() if value.numel() else 0.0
        assert error <= 1e-10 * max(1.0, float(value.abs().max())), key
    assert seen.launches
