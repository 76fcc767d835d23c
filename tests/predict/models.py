"""Small networks and posteriors for the tests of prediction."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from credo.posterior import DiagonalPosterior


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def around(
    model: nn.Module, variance: float = 0.05, deterministic: tuple[str, ...] = ()
) -> DiagonalPosterior:
    mean = dict(model.named_parameters())
    return DiagonalPosterior(
        mean, {name: torch.full_like(p, variance) for name, p in mean.items() if name not in deterministic}
    )


class Net(nn.Module):
    """Convolutions, BatchNorm, both ways of pooling and flattening."""

    def __init__(self, channels: int = 6, flatten: str = "view", inplace: bool = True) -> None:
        super().__init__()
        self.conv1, self.norm = nn.Conv2d(3, channels, 3), nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, 2 * channels, 3, padding=1, groups=2, bias=False)
        self.relu, self.drop = nn.ReLU(inplace=inplace), nn.Dropout(0.5)
        self.fc = nn.Linear(2 * channels * 4, 3)
        self.flatten = flatten

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.relu(self.norm(self.conv1(x))), 2)
        x = F.adaptive_avg_pool2d(F.avg_pool2d(self.conv2(x), 2, stride=1), 2)
        x = x.view(len(x), -1) if self.flatten == "view" else x.flatten(1)
        return self.fc(self.drop(x))


class Sequence(nn.Module):
    """Tokens in, attention and an LSTM between."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(11, 8), nn.LSTM(8, 8, batch_first=True)
        self.attend, self.head = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.attend(self.lstm(self.embed(tokens))[0]).mean(1))


class Random(nn.Module):
    """Draws from the global stream even in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.dropout(x, 0.5, training=True))


class Rewrites(nn.Module):
    """Changes its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.mul_(0.5))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))


def images(n: int = 6) -> Tensor:
    return torch.randn(n, 3, 9, 9, generator=generator(7))


def rows(n: int = 6) -> Tensor:
    return torch.randn(n, 4, generator=generator(8))


def tokens(n: int = 6) -> Tensor:
    return torch.randint(11, (n, 5), generator=generator(9))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "mlp": (mlp, rows),
    "narrow convolutions, view": (Net, images),
    "narrow convolutions, flatten": (lambda: Net(flatten="flatten", inplace=False), images),
    "wide convolutions": (lambda: Net(channels=32), images),
    "sequence": (Sequence, tokens),
    "random in eval": (Random, rows),
    "rewrites its input": (Rewrites, rows),
}
