"""The models under `fully_shard` that the tests train, plain or sharded, and their batches."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.distributed import tasks

STEPS = 3
SHARES = ("equal", "unequal")
Batch = tuple[Tensor, Tensor]


class Tied(nn.Module):
    """A language model: the embedding is the weight of the last layer too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(7, 4), nn.RMSNorm(4)
        self.mix, self.head = nn.Linear(4, 4), nn.Linear(4, 7)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.embed(tokens)
        return self.head(self.norm(hidden + torch.tanh(self.mix(hidden)))).transpose(1, 2)


class Merging(nn.Module):
    """Positions become rows outside of the layer that is sharded by itself; they are no examples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return self.second(hidden.reshape(-1, 6)).view(len(x), -1, 3).transpose(1, 2)


def _built(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return make().double()


def derived() -> nn.Module:
    """Weights that are computed from parameters, and a last layer of one row: three of four ranks have none of it."""
    first = nn.utils.parametrizations.weight_norm(nn.Linear(8, 5))
    return nn.Sequential(
        nn.Flatten(), first, nn.Tanh(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 1, bias=False)
    )


def images(channels: int = 3) -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, channels, 2), nn.GroupNorm(1, channels), nn.ReLU()),
        *(nn.Conv2d(channels, 5, 2), nn.Flatten(), nn.Linear(5, 3)),
    )


def with_statistics() -> nn.Module:
    """Without a bias before BatchNorm: its gradient would be zero, so that rounding alone would say where it goes."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(8, 5, bias=False), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)
    )


def _tokens(generator: torch.Generator) -> Batch:
    tokens = torch.randint(7, (tasks.EXAMPLES, 5), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def _rows(generator: torch.Generator) -> Batch:
    x = torch.randn(tasks.EXAMPLES, 2, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (tasks.EXAMPLES,), generator=generator)


def _pictures(generator: torch.Generator) -> Batch:
    x = torch.randn(tasks.EXAMPLES, 1, 3, 3, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (tasks.EXAMPLES,), generator=generator)


def _numbers(generator: torch.Generator) -> Batch:
    x, y = _rows(generator)
    return x, y.double()


def _positions(generator: torch.Generator) -> Batch:
    x, _ = _rows(generator)
    return x, torch.randint(3, (tasks.EXAMPLES, 2), generator=generator)


def of_squares(z: Tensor, y: Tensor, reduction: str) -> Tensor:
    return F.mse_loss(z[:, 0], y, reduction=reduction)


class Problem(NamedTuple):
    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    apart: tuple[str, ...]  # the layers that are gathered one after the other; all others are with the root
    loss: Callable[..., Tensor] = F.cross_entropy


PROBLEMS = {
    "layers": Problem(tasks.network, _rows, ("0", "2", "4", "5")),
    "all at once": Problem(tasks.network, _rows, ()),
    "tied": Problem(Tied, _tokens, ("mix",)),
    "derived": Problem(derived, _numbers, ("1", "5"), of_squares),
    "images": Problem(images, _pictures, ("0", "3", "5")),
    "merging": Problem(Merging, _positions, ("second",)),
    "statistics": Problem(with_statistics, _rows, ("1", "2")),
}


def model_of(problem: str, sharded: bool) -> nn.Module:
    model = _built(PROBLEMS[problem].make)
    if sharded:
        from torch.distributed.fsdp import fully_shard

        for name in PROBLEMS[problem].apart:
            fully_shard(model.get_submodule(name), reshard_after_forward=True)
        fully_shard(model)
    return model


def batches(problem: str, steps: int = STEPS) -> list[Batch]:
    generator = torch.Generator().manual_seed(7)
    return [PROBLEMS[problem].batch(generator) for _ in range(steps)]


def whole(value: Any) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value
