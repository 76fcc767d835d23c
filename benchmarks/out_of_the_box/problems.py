"""The problems: networks of many kinds on real data, each small enough for seconds of one core.

A problem is a model, its data (training and held-out examples), a loss, a batch size and a number of epochs. Held-out
examples are cut from the training sets. Nothing here knows an optimiser.
"""

import math
import pydoc_data.topics
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from credo.data import load
from credo.models import AlexNet, LeNet5, ResNet18

Data = tuple[Tensor, Tensor, Tensor, Tensor]  # training inputs and targets, held-out inputs and targets
SPLIT_SEED = 5


@dataclass(frozen=True)
class Problem:
    """One row of the table. `build` makes a fresh model under the global seed."""

    name: str
    build: Callable[[], nn.Module]
    data: Callable[[Path | None], Data]
    batch: int
    epochs: int
    task: str = "classification"  # or "regression", "language"
    prepare: Callable[[nn.Module, Path | None], None] | None = None  # trains the network beforehand
    series: str = "default"  # or "long": trained until Adam overfits; or "further"


def loss_of(task: str, outputs: Tensor, targets: Tensor) -> Tensor:
    """What users write for such a task."""
    if task == "regression":
        return F.mse_loss(outputs, targets)
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


# Data


@cache
def images(name: str, size: int, held: int, root: Path | None, classes: tuple[int, ...] = ()) -> Data:
    """`size` training and `held` held-out images, both of the training set; of some classes, renumbered, if told."""
    splits = load(name, root)
    x, y = splits.train.inputs, splits.train.targets
    if classes:
        chosen = torch.isin(y, torch.tensor(classes))
        x, y = x[chosen], y[chosen] - min(classes)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(SPLIT_SEED))
    parts = order[held : held + size], order[:held]
    train, kept = ((splits.normalise(x[own]), y[own]) for own in parts)
    return (*train, *kept)


@cache
def table(name: str, root: Path | None) -> Data:
    """A UCI regression set, standardised by its training part."""
    splits = load(f"uci:{name}", root)
    x = torch.cat([splits.train.inputs, splits.test.inputs])
    y = torch.cat([splits.train.targets, splits.test.targets])
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(SPLIT_SEED))
    held = len(y) // 4
    x, y = x[order], y[order]
    x = (x - x[held:].mean(0)) / x[held:].std(0).clamp(min=1e-6)
    y = (y - y[held:].mean(0)) / y[held:].std(0)
    return x[held:], y[held:], x[:held], y[:held]


@cache
def characters(length: int, size: int, held: int) -> Data:
    """Pieces of the text of Python's own manual (part of the standard library); the next character is the target."""
    text = "".join(pydoc_data.topics.topics.values())
    codes = torch.tensor([min(ord(c), 127) for c in text])
    starts = torch.randperm(len(codes) // length - 1, generator=torch.Generator().manual_seed(SPLIT_SEED))
    x = torch.stack([codes[k * length : (k + 1) * length] for k in starts[: size + held].tolist()])
    y = torch.stack([codes[k * length + 1 : (k + 1) * length + 1] for k in starts[: size + held].tolist()])
    return x[held:], y[held:], x[:held], y[:held]


@cache
def topics(length: int, size: int, held: int) -> Data:
    """Pieces of the ten longest texts of Python's manual; which text it is, is the target."""
    texts = sorted(pydoc_data.topics.topics.values(), key=len)[-10:]
    pairs = [
        (torch.tensor([min(ord(c), 127) for c in text[k : k + length]]), label)
        for label, text in enumerate(texts)
        for k in range(0, len(text) - length, length // 2)
    ]
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(SPLIT_SEED)).tolist()
    x = torch.stack([pairs[k][0] for k in order[: size + held]])
    y = torch.tensor([pairs[k][1] for k in order[: size + held]])
    return x[held:], y[held:], x[:held], y[:held]


# Networks


def mlp(*sizes: int, activation: type[nn.Module] = nn.ReLU) -> nn.Module:
    layers = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), activation())]
    return nn.Sequential(nn.Flatten(), *layers[:-1])


def cnn(channels: int, width: int, side: int, *, norm: bool, classes: int = 10) -> nn.Module:
    """Four convolutions of 3×3, two pools, one linear layer."""
    layers: list[nn.Module] = []
    for a, b, pool in (
        (channels, width, 2),
        (width, width, 2),
        (width, 2 * width, 1),
        (2 * width, 2 * width, 1),
    ):
        layers.append(nn.Conv2d(a, b, 3, padding=1, bias=not norm))
        if norm:
            layers.append(nn.BatchNorm2d(b))
        layers.append(nn.ReLU())
        if pool > 1:
            layers.append(nn.MaxPool2d(pool))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(2 * width * (side // 4) ** 2, classes))


class Recurrent(nn.Module):
    """An LSTM over the rows of an image, or over characters; the last state is classified."""

    def __init__(self, inputs: int, hidden: int, classes: int = 10, *, vocabulary: int = 0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, inputs) if vocabulary else nn.Identity()
        self.lstm = nn.LSTM(inputs, hidden, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.embedding(x)
        rows = rows.flatten(1, 2) if rows.ndim == 4 else rows  # one channel of an image
        states, _ = self.lstm(rows)
        logits: Tensor = self.head(states[:, -1])
        return logits


class Transformer(nn.Module):
    """Characters to the next character (causal), or to one class (mean over positions)."""

    def __init__(
        self, width: int, layers: int, length: int, outputs: int, *, causal: bool, dropout: float = 0.0
    ):
        super().__init__()
        self.causal = causal
        self.tokens = nn.Embedding(128, width)
        self.places = nn.Parameter(torch.randn(length, width) * 0.02)
        block = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1]) if self.causal else None
        hidden = self.norm(self.blocks(self.tokens(x) + self.places, mask=mask, is_causal=self.causal))
        logits: Tensor = self.head(hidden if self.causal else hidden.mean(1))
        return logits


def trained_before(model: nn.Module, root: Path | None) -> None:
    """Adam on the classes 0 to 4, from which the network is then fine-tuned on the classes 5 to 9."""
    x, y, _, _ = images("fashion_mnist", 6_000, 1_000, root, (0, 1, 2, 3, 4))
    optimizer, generator = torch.optim.Adam(model.parameters()), torch.Generator().manual_seed(0)
    for _ in range(3):
        for batch in torch.randperm(len(x), generator=generator).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()


FASHION, CIFAR = "fashion_mnist", "cifar10"
PROBLEMS = (
    Problem(
        "digits 1,087: MLP 100",
        lambda: mlp(64, 100, 10),
        lambda root: images("digits", 1087, 350, None),
        32,
        20,
    ),
    Problem(
        "digits 100: MLP 100", lambda: mlp(64, 100, 10), lambda root: images("digits", 100, 350, None), 16, 60
    ),
    Problem(
        "Fashion 4,000: MLP of 8 layers",
        lambda: mlp(784, *[128] * 7, 10),
        lambda root: images(FASHION, 4_000, 1_000, root),
        64,
        10,
    ),
    Problem(
        "Fashion 50,000: MLP 100-100",
        lambda: mlp(784, 100, 100, 10),
        lambda root: images(FASHION, 50_000, 1_000, root),
        256,
        5,
    ),
    Problem(
        "Fashion 6,000: LeNet-5",
        lambda: LeNet5(in_channels=1, image_size=28),
        lambda root: images(FASHION, 6_000, 1_000, root),
        128,
        8,
    ),
    Problem(
        "Fashion 4,000: CNN",
        lambda: cnn(1, 16, 28, norm=False),
        lambda root: images(FASHION, 4_000, 1_000, root),
        64,
        5,
    ),
    Problem(
        "CIFAR 3,000: CNN, BatchNorm",
        lambda: cnn(3, 16, 32, norm=True),
        lambda root: images(CIFAR, 3_000, 1_000, root),
        64,
        8,
    ),
    Problem("CIFAR 2,000: AlexNet", AlexNet, lambda root: images(CIFAR, 2_000, 1_000, root), 64, 10),
    Problem(
        "CIFAR 3,000: ResNet-18, width 8",
        lambda: ResNet18(width=8),
        lambda root: images(CIFAR, 3_000, 1_000, root),
        64,
        8,
    ),
    Problem(
        "Fashion 3,000: LSTM over rows",
        lambda: Recurrent(28, 64),
        lambda root: images(FASHION, 3_000, 1_000, root),
        64,
        8,
    ),
    Problem(
        "texts 2,000: transformer classifier",
        lambda: Transformer(32, 2, 64, 10, causal=False),
        lambda root: topics(64, 2_000, 1_000),
        32,
        8,
    ),
    Problem(
        "characters 2,000: causal transformer",
        lambda: Transformer(32, 2, 32, 128, causal=True),
        lambda root: characters(32, 2_000, 500),
        32,
        6,
        "language",
    ),
    Problem(
        "UCI concrete: MLP 50",
        lambda: mlp(8, 50, 1),
        lambda root: table("concrete", root),
        32,
        40,
        "regression",
    ),
    Problem(
        "UCI energy: MLP 50-50",
        lambda: mlp(8, 50, 50, 1, activation=nn.Tanh),
        lambda root: table("energy", root),
        16,
        30,
        "regression",
    ),
    Problem(
        "Fashion, classes 5 to 9, 500: fine-tuned CNN",
        lambda: cnn(1, 16, 28, norm=True, classes=5),
        lambda root: images(FASHION, 500, 1_000, root, (5, 6, 7, 8, 9)),
        32,
        8,
        prepare=trained_before,
    ),
    Problem(
        "CIFAR 5,000: CNN, BatchNorm, 60 epochs",
        lambda: cnn(3, 16, 32, norm=True),
        lambda root: images(CIFAR, 5_000, 5_000, root),
        64,
        60,
        series="long",
    ),
    Problem(
        "CIFAR 5,000: LeNet-5, 60 epochs",
        LeNet5,
        lambda root: images(CIFAR, 5_000, 5_000, root),
        64,
        60,
        series="long",
    ),
    Problem(
        "Fashion 5,000: MLP 200-200, 60 epochs",
        lambda: mlp(784, 200, 200, 10),
        lambda root: images(FASHION, 5_000, 5_000, root),
        64,
        60,
        series="long",
    ),
)


def chance(problem: Problem, targets: Tensor) -> float:
    """The NLL of who knows only how frequent the targets are; for regression the RMSE of the mean, which is 1."""
    if problem.task == "regression":
        return 1.0
    shares = torch.bincount(targets.flatten()).double() / targets.numel()
    return -float((shares[shares > 0] * shares[shares > 0].log()).sum()) or math.nan
