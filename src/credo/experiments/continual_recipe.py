"""A recipe of continual learning is data: a stream of tasks, and for each method everything that decides a run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Setting: TypeAlias = float | int | str | bool
Method: TypeAlias = Literal["vogn", "vcl", "ewc", "adam", "joint"]
Size: TypeAlias = Literal["paper", "cpu"]


@dataclass(frozen=True)
class ContinualTraining:
    """How one method learns one task; the seed and the stream are the run's."""

    method: Method
    epochs: int
    batch_size: int
    settings: Mapping[str, Setting] = field(default_factory=dict)  # keyword arguments of the optimiser
    start: Literal["fresh", "mean"] = "fresh"  # where the mean of a task starts; for vogn and vcl
    hold: float = (
        0.0  # the learning rate of each task stays for this share of the task, then falls exponentially
    )
    last_lr: float = 1.0  # to this share of its first value
    samples: int = 10  # C, the samples of the posterior at test time
    strength: float = 0.0  # λ, for ewc
    online: float | None = None  # decay of the online variant, for ewc


@dataclass(frozen=True)
class ContinualRow:
    """One curve of the figure. `published`: the average accuracy after all tasks, as a fraction, about."""

    name: str
    paper: ContinualTraining
    cpu: ContinualTraining
    published: float | None = None

    def training(self, size: Size) -> ContinualTraining:
        return self.paper if size == "paper" else self.cpu


@dataclass(frozen=True)
class ContinualRecipe:
    """stream: "permuted" (one head, a permutation of the pixels for each task) or "split" (a head for each pair)."""

    name: str
    title: str
    source: str
    data: str  # a name that credo.data knows
    stream: Literal["permuted", "split"]
    tasks: Mapping[Size, int]
    seeds: Mapping[Size, int]
    rows: tuple[ContinualRow, ...]
    hidden: tuple[int, ...] = (100, 100)  # of the fully connected network
    note: str = ""
