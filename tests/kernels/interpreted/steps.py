"""Whole steps with Triton's programs on an emulated device: the numbers of the CPU, samples included."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import credo
from tests.device.emulated import Device
from tests.device.triton import interpret, offered


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, bias=False),  # a bias before a norm has a gradient of rounding alone
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 3, 3, stride=2),
        nn.Flatten(),
        nn.Linear(12, 3),
    )


class Tokens(nn.Module):
    """Linear layers on sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x.flatten(2).mT[..., :6]).tanh()).mean(1)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "convolutions": convolutional,
    "sequences": lambda: nn.Sequential(nn.Unflatten(2, (5, 1)), nn.Flatten(3), nn.Flatten(1, 2), Tokens()),
}
METHODS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "VOGN": lambda model: credo.VOGN(model, data_size=50, seed=3),
    "VOGN with numbers": lambda model: credo.VOGN(
        model, 0.1, data_size=50, prior_precision=1.0, damping=0.1, tempering=0.5, mc_samples=2
    ),
    "OGN": lambda model: credo.OGN(model, data_size=50),
    "IVON": lambda model: credo.IVON(model, data_size=50, mc_samples=2),
    "BayesByBackprop": lambda model: credo.BayesByBackprop(model, data_size=50),
}
STARTED = {
    "VOGN": {"lists.sample", "lists.all_finite", "lists.vogn"},
    "VOGN with numbers": {"lists.sample", "lists.all_finite", "lists.vogn"},
    "OGN": {"lists.all_finite", "lists.vogn"},
    "IVON": {"lists.sample", "lists.all_finite", "lists.ivon", "lists.restore"},
    "BayesByBackprop": set(),
}


def trained(
    model_of: Callable[[], nn.Module], method: Callable, dtype: torch.dtype, device: str, poison: bool = False
):
    """The parameters and state after three steps, on the CPU; there may be one more, with a gradient that is NaN."""
    generator = torch.Generator().manual_seed(0)
    model = model_of().to(dtype)
    for p in model.parameters():
        p.data.copy_(torch.randn(p.shape, generator=generator) * 0.3 + 0.1)
    x = torch.randn(4, 2, 5, 5, generator=generator).to(dtype)
    y = torch.tensor([0, 1, 2, 1])
    model, x, y = model.to(device), x.to(device), y.to(device)
    optimizer = method(model)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if poison and optimizer.counters["step"] == 3:
            list(model.parameters())[-1].grad.fill_(math.nan)
        return loss

    for _ in range(4 if poison else 3):
        optimizer.step(closure)
    state = optimizer.state_dict()["state"]
    kept = [value.cpu() for own in state.values() for value in own.values() if isinstance(value, Tensor)]
    return [p.detach().cpu() for p in model.parameters()], kept


def assert_alike(
    found: tuple[list[Tensor], list[Tensor]], truth: tuple[list[Tensor], list[Tensor]], tolerance: float
):
    for one, other in zip(found, truth, strict=True):
        for actual, expected in zip(one, other, strict=True):
            difference = (actual.double() - expected.double()).abs().max() if actual.numel() else 0.0
            assert difference <= tolerance * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("model", "dtype"), [("convolutions", torch.float32), ("sequences", torch.float64)], ids=str
)
def test_steps_are_those_of_the_cpu(model, dtype, method):
    """The C++ kernels draw the same noise; the CPU is the reference in its own type."""
    expected = trained(MODELS[model], METHODS[method], dtype, "cpu")
    with Device() as seen, offered(interpret) as started:
        found = trained(MODELS[model], METHODS[method], dtype, "npu")
    assert set(started) >= STARTED[method]
    if dtype is torch.float32 and method == "BayesByBackprop":  # it has noise on the outputs of convolutions
        assert "lists.perturb" in started
    elif dtype is torch.float32 and method != "IVON":
        assert {"sums.convolution_sums", "normalisation.batch_norm_shares"} <= set(started)
    assert seen.launches.total() > 0
    assert_alike(found, expected, 1e-10 if dtype is torch.float64 else 2e-4)


@pytest.mark.filterwarnings("ignore:.*was refused")
@pytest.mark.parametrize("method", ["VOGN", "IVON"])
def test_a_step_that_is_refused_changes_nothing(method):
    with Device(), offered(interpret) as started:
        before = trained(MODELS["sequences"], METHODS[method], torch.float64, "npu")
        after = trained(MODELS["sequences"], METHODS[method], torch.float64, "npu", poison=True)
    assert "lists.all_finite" in started
    for one, other in zip([*before[0], *before[1]], [*after[0], *after[1]], strict=True):
        assert torch.equal(one, other)
