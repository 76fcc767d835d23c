"""Problems on which no default was chosen: other networks, sizes and losses. They are run to see what a rule is worth.

python -m benchmarks.out_of_the_box --data DIR --series further
"""

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.out_of_the_box.problems import (
    CIFAR,
    FASHION,
    SPLIT_SEED,
    Data,
    Problem,
    Recurrent,
    Transformer,
    characters,
    cnn,
    images,
    mlp,
    table,
    topics,
)

MNIST = "mnist"


@cache
def tumours() -> Data:
    """scikit-learn's breast cancer data, standardised by the training part."""
    from sklearn.datasets import load_breast_cancer

    x, y = (torch.as_tensor(part) for part in load_breast_cancer(return_X_y=True))
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(SPLIT_SEED))
    x, y, held = x.float()[order], y[order], 170
    x = (x - x[held:].mean(0)) / x[held:].std(0)
    return x[held:], y[held:], x[:held], y[:held]


@cache
def in_thousands(name: str, root: Path | None) -> Data:
    """A UCI regression set whose targets were not standardised: a mean of 30 and a spread of 10 of some unit."""
    x, y, x_held, y_held = table(name, root)
    return x, 30 + 10 * y, x_held, 30 + 10 * y_held


@cache
def wave(size: int) -> Data:
    """A noisy sine of one input."""
    generator = torch.Generator().manual_seed(SPLIT_SEED)
    x = torch.rand(size + 500, 1, generator=generator) * 6 - 3
    y = torch.sin(2 * x) + 0.2 * torch.randn(size + 500, 1, generator=generator)
    return x[:size], y[:size], x[size:], y[size:]


@cache
def itself(root: Path | None) -> Data:
    """Digits as their own targets: an autoencoder."""
    x, _, x_held, _ = images("digits", 1087, 350, root)
    return x, x.flatten(1), x_held, x_held.flatten(1)


@cache
def rare(root: Path | None) -> Data:
    """Fashion-MNIST with nine examples in ten of the first five classes left out."""
    x, y, x_held, y_held = images(FASHION, 8_000, 2_000, root)

    def thin(targets: Tensor) -> Tensor:
        return (targets >= 5) | (torch.arange(len(targets)) % 10 == 0)

    return x[thin(y)], y[thin(y)], x_held[thin(y_held)], y_held[thin(y_held)]


class Words(nn.Module):
    """Character n-grams hashed into an embedding bag, then an MLP."""

    def __init__(self, length: int, width: int, classes: int) -> None:
        super().__init__()
        self.bag = nn.Embedding(4096, width)
        self.head = mlp(width, 64, classes)
        self.length = length

    def forward(self, x: Tensor) -> Tensor:
        grams = (x[:, :-2] * 7919 + x[:, 1:-1] * 104729 + x[:, 2:] * 31) % 4096
        logits: Tensor = self.head(self.bag(grams).mean(1))
        return logits


class Gated(nn.Module):
    """A GRU of two layers over characters; the mean of the states is classified."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, width)
        self.gru = nn.GRU(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.gru(self.embedding(x))
        logits: Tensor = self.head(states.mean(1))
        return logits


class Patches(nn.Module):
    """A vision transformer: patches of 4×4, learned places, a token for the class, norms after the sums if told."""

    def __init__(self, channels: int, side: int, width: int, layers: int, *, norm_first: bool) -> None:
        super().__init__()
        self.patch = nn.Conv2d(channels, width, 4, 4)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.randn((side // 4) ** 2 + 1, width) * 0.02)
        block = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True, norm_first=norm_first)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patch(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(x), -1, -1), patches], 1) + self.places
        logits: Tensor = self.head(self.blocks(tokens)[:, 0])
        return logits


def normed_mlp(*sizes: int, norm: type[nn.Module], dropout: float = 0.0) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten()]
    for a, b in pairwise(sizes[:-1]):
        layers += [nn.Linear(a, b), norm(b), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(sizes[-2], sizes[-1]))


def separable(width: int) -> nn.Module:
    """Depthwise and pointwise convolutions with group norms, after a MobileNet."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 2, 1), nn.GroupNorm(4, width), nn.SiLU()]
    for a, b, stride in ((width, 2 * width, 1), (2 * width, 4 * width, 2), (4 * width, 4 * width, 1)):
        layers += [nn.Conv2d(a, a, 3, stride, 1, groups=a), nn.GroupNorm(4, a), nn.SiLU()]
        layers += [nn.Conv2d(a, b, 1), nn.GroupNorm(4, b), nn.SiLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10))


def small_start(model: nn.Module) -> nn.Module:
    """Weights of 0.02 whatever the width, biases of zero: how language models are often initialised."""
    for part in model.modules():
        if isinstance(part, nn.MultiheadAttention):
            nn.init.normal_(part.in_proj_weight, 0, 0.02)
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, 0, 0.02)
        if isinstance(part, nn.Linear) and part.bias is not None:
            nn.init.zeros_(part.bias)
    return model


def problem(
    name: str,
    build: Callable[[], nn.Module],
    data: Callable[[Path | None], Data],
    batch: int,
    epochs: int,
    task: str = "classification",
) -> Problem:
    return Problem(name, build, data, batch, epochs, task, series="further")


FURTHER: tuple[Problem, ...] = (
    problem(
        "MNIST 5,000: CNN", lambda: cnn(1, 8, 28, norm=False), lambda r: images(MNIST, 5_000, 1_000, r), 64, 5
    ),
    problem(
        "MNIST 1,000: MLP 1,000", lambda: mlp(784, 1000, 10), lambda r: images(MNIST, 1_000, 2_000, r), 32, 20
    ),
    problem(
        "digits: tanh MLP of 6 layers",
        lambda: mlp(64, *[64] * 5, 10, activation=nn.Tanh),
        lambda r: images("digits", 1087, 350, r),
        32,
        30,
    ),
    problem(
        "digits: narrow ReLU MLP of 10 layers",
        lambda: mlp(64, *[32] * 9, 10),
        lambda r: images("digits", 1087, 350, r),
        32,
        40,
    ),
    problem(
        "digits: logistic regression", lambda: mlp(64, 10), lambda r: images("digits", 1087, 350, r), 32, 20
    ),
    problem(
        "Fashion 4,000: MLP, BatchNorm, dropout",
        lambda: normed_mlp(784, 256, 256, 10, norm=nn.BatchNorm1d, dropout=0.2),
        lambda r: images(FASHION, 4_000, 1_000, r),
        64,
        10,
    ),
    problem(
        "Fashion 4,000: MLP, LayerNorm",
        lambda: normed_mlp(784, 128, 128, 128, 10, norm=nn.LayerNorm),
        lambda r: images(FASHION, 4_000, 1_000, r),
        64,
        10,
    ),
    problem(
        "Fashion 20,000: MLP, batch 1,000",
        lambda: mlp(784, 200, 10),
        lambda r: images(FASHION, 20_000, 1_000, r),
        1_000,
        15,
    ),
    problem("Fashion, rare classes: CNN", lambda: cnn(1, 16, 28, norm=True), rare, 64, 6),
    problem(
        "CIFAR 4,000: separable CNN, GroupNorm",
        lambda: separable(16),
        lambda r: images(CIFAR, 4_000, 1_000, r),
        64,
        8,
    ),
    problem(
        "CIFAR 4,000: vision transformer",
        lambda: Patches(3, 32, 48, 3, norm_first=True),
        lambda r: images(CIFAR, 4_000, 1_000, r),
        64,
        8,
    ),
    problem(
        "Fashion 4,000: vision transformer, norms last",
        lambda: Patches(1, 28, 48, 2, norm_first=False),
        lambda r: images(FASHION, 4_000, 1_000, r),
        64,
        6,
    ),
    problem(
        "texts 2,000: hashed bags", lambda: Words(64, 32, 10), lambda r: topics(64, 2_000, 1_000), 32, 10
    ),
    problem(
        "texts 2,000: GRU of 2 layers", lambda: Gated(48, 10), lambda r: topics(64, 2_000, 1_000), 32, 10
    ),
    problem(
        "texts 2,000: LSTM on characters",
        lambda: Recurrent(32, 64, vocabulary=128),
        lambda r: topics(64, 2_000, 1_000),
        32,
        10,
    ),
    problem(
        "characters 4,000: bigram MLP",
        lambda: nn.Sequential(nn.Embedding(128, 32), nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 128)),
        lambda r: characters(32, 4_000, 500),
        64,
        5,
        "language",
    ),
    problem(
        "characters 2,000: causal transformer, weights of 0.02",
        lambda: small_start(Transformer(64, 2, 32, 128, causal=True)),
        lambda r: characters(32, 2_000, 500),
        32,
        6,
        "language",
    ),
    problem(
        "texts 2,000: transformer classifier, weights of 0.02",
        lambda: small_start(Transformer(64, 2, 64, 10, causal=False)),
        lambda r: topics(64, 2_000, 1_000),
        32,
        8,
    ),
    problem("tumours: MLP 50", lambda: mlp(30, 50, 2), lambda r: tumours(), 32, 30),
    problem("UCI yacht: MLP 50", lambda: mlp(6, 50, 1), lambda r: table("yacht", r), 16, 60, "regression"),
    problem(
        "UCI wine: MLP 50-50",
        lambda: mlp(11, 50, 50, 1),
        lambda r: table("wine-quality-red", r),
        32,
        20,
        "regression",
    ),
    problem(
        "UCI power: MLP 50", lambda: mlp(4, 50, 1), lambda r: table("power-plant", r), 64, 8, "regression"
    ),
    problem(
        "UCI boston: MLP 50",
        lambda: mlp(13, 50, 1),
        lambda r: table("bostonHousing", r),
        32,
        40,
        "regression",
    ),
    problem(
        "UCI concrete, targets of 30 ± 10: MLP 50",
        lambda: mlp(8, 50, 1),
        lambda r: in_thousands("concrete", r),
        32,
        40,
        "regression",
    ),
    problem(
        "sine, 200: tanh MLP 50-50",
        lambda: mlp(1, 50, 50, 1, activation=nn.Tanh),
        lambda r: wave(200),
        20,
        100,
        "regression",
    ),
    problem("digits: autoencoder", lambda: mlp(64, 64, 16, 64, 64), itself, 32, 20, "regression"),
)
