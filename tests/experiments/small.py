"""Runs of a few milliseconds: three blobs in the plane, a network with everything that has to be resumed."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from credo.data.examples import Examples, Splits
from credo.experiments.checkpoint import Checkpoints
from credo.experiments.recipe import Training
from credo.experiments.results import Result
from credo.experiments.run_folder import read_log, without_times


def blobs(n: int, seed: int) -> Examples:
    generator = torch.Generator().manual_seed(seed)
    targets = torch.arange(n) % 3
    centres = torch.tensor([[0.0, 2.0], [2.0, -1.0], [-2.0, -1.0]])
    return Examples(centres[targets] + torch.randn(n, 2, generator=generator), targets)


def three_blobs() -> Splits:
    return Splits("blobs", blobs(60, 0), blobs(33, 1), ("red", "green", "blue"))


class Small(nn.Module):
    """BatchNorm buffers to be saved, dropout masks from the global stream."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(2, 8), nn.BatchNorm1d(8)
        self.drop, self.last = nn.Dropout(dropout), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(torch.relu(self.norm(self.first(x)))))


def small() -> nn.Module:
    return Small()


def small_with_dropout() -> nn.Module:
    return Small(dropout=0.3)


OLD = {"w": torch.tensor([1.0, -2.0]), "n": 1}
NEW = {"w": torch.tensor([3.0, math.nan]), "n": 2}

VOGN = Training(
    "vogn",
    small,
    three_blobs,
    settings={"lr": 5e-3, "damping": 1e-2, "mc_samples": 2},
    epochs=3,
    batch_size=16,
    milestones=(2,),
    warmup_epochs=0.5,
    tempering_from=0.1,
    tempering_epochs=2.0,
    samples=3,
)
TRAININGS: dict[str, Training] = {
    "vogn": VOGN,
    "ogn": replace(VOGN, method="ogn", settings={"lr": 5e-3, "damping": 1e-2}),
    "sgd": replace(VOGN, method="sgd", settings={"lr": 0.05}, tempering_from=None),
    "adam": replace(VOGN, method="adam", settings={"lr": 0.01, "weight_decay": 1e-3}, tempering_from=None),
    "swag": replace(
        VOGN, method="swag", settings={"lr": 0.05, "collect_from": 2, "rank": 2}, tempering_from=None
    ),
    "laplace": replace(
        VOGN,
        method="laplace",
        settings={"lr": 0.01, "structure": "kronecker"},
        tempering_from=None,
        validation_size=10,
    ),
    "mc_dropout": replace(
        VOGN, method="mc_dropout", model=small_with_dropout, settings={"lr": 0.05}, tempering_from=None
    ),
}


def last_state(folder: Path) -> Any:
    """All that the last checkpoint holds, without times."""
    state = Checkpoints(folder / "checkpoint").load_last()
    state["log"] = [without_times(row) for row in state["log"]]
    return {name: value for name, value in state.items() if name != "seconds"}


def log_without_times(folder: Path) -> list[str]:
    return [str(without_times(row)) for row in read_log(folder / "log.jsonl")]  # str: NaN equals itself


def same_metrics(one: Result, other: Result) -> bool:
    times = {"seconds_per_epoch"}
    left, right = ({k: v for k, v in r.metrics.items() if k not in times} for r in (one, other))
    return str(left) == str(right)
