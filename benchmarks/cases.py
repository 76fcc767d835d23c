"""What is measured: a network, a batch, and the mode it is trained in."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from credo.models import MLP, AlexNet, LeNet5, ResNet18

CLASSES = 10
CHECKED = 4  # examples on which the results are compared with the truth


@dataclass(frozen=True)
class Problem:
    """One contender's own copy of a network, and the batch that all contenders share in value."""

    model: nn.Module
    x: Tensor
    y: Tensor

    def loss(self) -> Tensor:
        return F.cross_entropy(self.model(self.x), self.y)


@dataclass(frozen=True)
class Case:
    name: str
    title: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batch: int
    training: bool = True
    channels_last: bool = False
    peers: bool = True  # whether the other libraries take part

    def problem(self) -> Problem:
        """The same weights and data at every call, whatever the global generator did before."""
        generator = torch.Generator().manual_seed(1)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = self.build().train(self.training)
        x = torch.randn(self.batch, *self.shape, generator=generator)
        y = torch.randint(CLASSES, (self.batch,), generator=generator)
        if self.channels_last:
            model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
        return Problem(model, x, y)

    def exact_problem(self) -> Problem:
        """A part of the batch in float64: there, right and wrong differ by ten orders of magnitude.

        In float32 they need not: ReLUs on the other side of zero change a ResNet's plain gradient by 1e-3.
        """
        problem = self.problem()
        return Problem(problem.model.double(), problem.x[:CHECKED].double(), problem.y[:CHECKED])


IMAGE = (3, 32, 32)


def small_resnet() -> nn.Module:
    return ResNet18(stem="cifar", width=16)


CASES = [
    Case("mlp", "MLP 784-100-100-10, batch 256", MLP, (784,), 256),
    Case("lenet5", "LeNet-5, batch 128", LeNet5, IMAGE, 128),
    Case("alexnet", "AlexNet of the paper, batch 128", AlexNet, IMAGE, 128),
    Case("resnet18-w16", "ResNet-18, 3×3 stem, width 16, batch 128", small_resnet, IMAGE, 128),
    Case(
        "resnet18-w64", "ResNet-18, 3×3 stem, width 64, batch 32", lambda: ResNet18(stem="cifar"), IMAGE, 32
    ),
    Case(
        "channels-last",
        "ResNet-18, width 16, batch 128, channels_last",
        small_resnet,
        IMAGE,
        128,
        channels_last=True,
        peers=False,
    ),
    Case(
        "batchnorm-eval",
        "ResNet-18, width 16, batch 128, BatchNorm in eval mode",
        small_resnet,
        IMAGE,
        128,
        training=False,
    ),
]
