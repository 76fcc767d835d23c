"""A recipe is data: a table or figure of the paper as rows; a row holds everything that decides a run but its seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from torch import nn

if TYPE_CHECKING:
    from credo.data.examples import Splits

Setting: TypeAlias = float | int | str | bool
Published: TypeAlias = Mapping[str, tuple[float, float | None]]

NOTHING: Final[Mapping[str, Setting]] = MappingProxyType({})


@dataclass(frozen=True)
class TaskStream:
    """Tasks made from one data set, learned one after the other, and what is carried from each to the next.

    kind: "permuted" (one head, a permutation of the pixels for each task) or "split" (a head for each pair of classes).
    """

    kind: Literal["permuted", "split"]
    count: int
    start: Literal["fresh", "mean"] = "fresh"  # where the mean of a task starts; for vogn and vcl
    hold: float = 0.0  # the learning rate stays for this share of each task, then falls exponentially
    last_lr: float = 1.0  # to this share of its first value
    strength: float = 0.0  # λ, for ewc
    online: float | None = None  # decay of the online variant, for ewc


@dataclass(frozen=True)
class Training:
    """Everything that decides a run but its seed: two runs of one Training and one seed are equal bit by bit.

    With `tasks` it is a stream of tasks: `epochs` are those of each, and the other fields that count are method, model,
    data, settings, model_options, batch_size and samples.
    """

    method: str  # a key of experiments.methods.METHODS; of streams.METHODS for a stream
    model: str | Callable[[], nn.Module]  # a registered name, or the user's own factory
    data: str | Callable[[], Splits]  # a registered name, or the user's own
    # Keyword arguments of the optimiser, and of a registered model
    settings: Mapping[str, Setting] = field(default_factory=lambda: NOTHING)
    model_options: Mapping[str, Setting] = field(default_factory=lambda: NOTHING)
    epochs: int = 10
    batch_size: int = 128
    # The data set's own augmentation; its ρ reaches the optimiser unless settings say otherwise
    augment: bool = False
    train_size: int | None = None  # the first n after a fixed shuffle, for runs of CPU size
    test_size: int | None = None
    validation_size: int | None = None  # kept out of the training set after the same shuffle, its last n
    milestones: tuple[int, ...] = ()  # after each of these epochs the learning rate is multiplied by `decay`
    decay: float = 0.1
    warmup_epochs: float = 0.0  # gradual warm-up of the learning rate, linear from `warmup_from`
    warmup_from: float = 0.0
    cosine: bool = False  # after the warm-up the learning rate falls to 0 along half a cosine
    tempering_from: float | None = None  # τ rises linearly from here to settings["tempering"]
    tempering_epochs: float = 0.0
    samples: int = 10  # C, the samples of the posterior at test time
    epoch_samples: int | None = None  # the same in the evaluations before the last; None: as many
    epoch_test_size: int | None = None  # and the test examples in these; None: all
    # Left out of training and test, and kept as the OOD set "held_out"
    held_out_classes: tuple[int, ...] = ()
    ood: tuple[str, ...] = ()  # names of further OOD data sets
    task: str = "classification"  # or "regression"
    # Of many processes: those of one group share their data, and differ in their samples
    mc_groups: int | None = None
    tasks: TaskStream | None = None  # None: a single task


@dataclass(frozen=True)
class Row:
    """One line of a table: the paper's settings, a variant of CPU size, and what the paper published.

    `published` maps a metric ("train_accuracy", "accuracy", "nll", "ece", "auroc", "seconds_per_epoch", "epochs", …) to
    its mean and standard deviation, or None where the paper gives none; accuracies are fractions in [0, 1].
    """

    name: str
    paper: Training | None
    cpu: Training | None
    published: Published = field(default_factory=lambda: MappingProxyType({}))

    def training(self, size: str) -> Training | None:
        """That of a size, "cpu" or "paper"; None where the row has none."""
        return self.cpu if size == "cpu" else self.paper


@dataclass(frozen=True)
class Recipe:
    """A table or figure of the paper, or the user's own comparison."""

    name: str
    title: str
    source: str  # "Table 1: LeNet-5 on CIFAR-10"
    rows: tuple[Row, ...]
    figures: tuple[str, ...] = ()
    note: str = ""  # what the CPU size changes, and known slips in the paper
    seeds: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))  # by size; 1 unless given

    @property
    def is_stream(self) -> bool:
        """Whether its rows learn streams of tasks."""
        trainings = [
            training for row in self.rows for training in (row.paper, row.cpu) if training is not None
        ]
        return any(training.tasks is not None for training in trainings)
