"""Networks whose steps are counted, and one step of a method on a device."""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import credo
from credo.errors import TrainingWarning
from credo.models import LeNet5, ResNet18
from tests.device.emulated import Device, Seen, memory

BATCH = 128


class Mean(nn.Module):
    """Over positions."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


class Last(nn.Module):
    """What a recurrent layer says at the end."""

    def forward(self, x: tuple[Tensor, Any]) -> Tensor:
        return x[0][:, -1]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 3))


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
    return nn.Sequential(layer, Mean(), nn.Linear(16, 3))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "MLP": (mlp, (20,)),
    "LeNet-5": (LeNet5, (3, 32, 32)),
    "transformer layer": (transformer, (6, 16)),
    "LSTM": (lambda: nn.Sequential(nn.LSTM(8, 16, batch_first=True), Last(), nn.Linear(16, 3)), (12, 8)),
    "ResNet-18": (lambda: ResNet18(stem="cifar"), (3, 32, 32)),
}


class Step(NamedTuple):
    """What one step has asked of the device."""

    launches: int
    waits: int
    copies: int
    before: int  # bytes on the device
    peak: int
    seen: Seen


def step_of(network: str, method: str, *, steps: int = 4, batch: int = BATCH, **options: Any) -> Step:
    """The last of some steps, without numbers: what is launched does not depend on them."""
    with Device(numbers=False) as seen, warnings.catch_warnings():
        warnings.simplefilter("ignore", TrainingWarning)
        build, shape = NETWORKS[network]
        model = build().to("npu:0")
        x, y = torch.randn(batch, *shape).to("npu:0"), torch.randint(0, 3, (batch,)).to("npu:0")
        if method == "Adam":
            optimizer: Any = torch.optim.Adam(model.parameters(), foreach=True)
        else:
            optimizer = getattr(credo, method)(model, data_size=50_000, **options)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        for _ in range(steps):
            seen.forget()
            before = memory.now
            optimizer.step(closure)
        found = seen.launches.total(), seen.waits.total(), seen.copies.total()
        return Step(*found, before, memory.peak, seen)
