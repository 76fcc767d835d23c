"""A task: data to learn from, data to be tested on, and the head that answers; and coresets of it.

A coreset is a few examples of a task, kept for a last look before predicting. They are left out of what the posterior
learns from (Nguyen et al. 2018), so that no example counts twice.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from credo.errors import InvalidType, InvalidValue
from credo.optim.arguments import option, whole

Transform: TypeAlias = Callable[[Tensor], Tensor]
Batch: TypeAlias = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Task:
    """One problem of a stream; the learner sees its training data once and never again.

    transform: what is done to the inputs of a batch before the model sees them (a permutation of the pixels),
        so that many tasks can share one set of tensors.
    head: the head of a `MultiHead` that answers; None for a model with a single one.
    """

    name: str
    inputs: Tensor
    targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor
    transform: Transform | None = None
    head: str | None = None

    def __post_init__(self) -> None:
        for part, x, y in (
            ("", self.inputs, self.targets),
            ("test_", self.test_inputs, self.test_targets),
        ):
            if not isinstance(x, Tensor) or not isinstance(y, Tensor):
                raise InvalidType(f"{part}inputs and {part}targets of task {self.name!r} must be tensors")
            if x.dim() == 0 or y.dim() == 0 or len(x) != len(y) or len(x) == 0:
                raise InvalidValue(
                    f"task {self.name!r} has {part}inputs of shape {tuple(x.shape)} and {part}targets of shape "
                    f"{tuple(y.shape)}; give as many targets as inputs, at least one"
                )

    def __len__(self) -> int:
        return len(self.inputs)

    def seen(self, inputs: Tensor) -> Tensor:
        """The inputs as the model gets them."""
        return inputs if self.transform is None else self.transform(inputs)

    def shuffled(self, size: int, generator: torch.Generator) -> list[Tensor]:
        """The rows of the training data in batches, in an order drawn from `generator`; the last may be short."""
        order = torch.randperm(len(self), generator=generator)
        return [order[start : start + size] for start in range(0, len(self), size)]

    def batch(self, rows: Tensor) -> Batch:
        """Some of the training data, as the model gets it."""
        places = rows.to(self.inputs.device)
        return self.seen(self.inputs[places]), self.targets[places]

    def tests(self, size: int = 1000) -> Iterator[Batch]:
        """The test data in order."""
        for start in range(0, len(self.test_inputs), size):
            rows = slice(start, start + size)
            yield self.seen(self.test_inputs[rows]), self.test_targets[rows]

    def only(self, rows: Tensor) -> "Task":
        """The same task with some of its training data."""
        return replace(self, inputs=self.inputs[rows], targets=self.targets[rows])


@dataclass(frozen=True)
class Coreset:
    """How many examples of each task are kept, which, and how long the last look at them is.

    method: "random", or "k-center": each next example is the one farthest from all chosen so far.
    steps: optimiser steps of the last look, each on all the coresets that share the head.
    """

    size: int
    method: str = "random"
    steps: int = 100

    def __post_init__(self) -> None:
        whole("size", self.size, 1)
        whole("steps", self.steps, 1)
        option("method", self.method, ("random", "k-center"))

    def split(self, task: Task, generator: torch.Generator) -> tuple[Task, Task]:
        """The task without the coreset, and the task with only the coreset as its training data."""
        if self.size >= len(task):
            raise InvalidValue(
                f"size={self.size}: a coreset must be smaller than its task, and task {task.name!r} has "
                f"{len(task)} examples"
            )
        if self.method == "random":
            kept = torch.randperm(len(task), generator=generator)[: self.size]
        else:
            kept = _spread(task.seen(task.inputs).flatten(1), self.size, generator)
        rest = torch.ones(len(task), dtype=torch.bool).index_fill_(0, kept, False).nonzero()[:, 0]
        device = task.inputs.device
        return task.only(rest.to(device)), task.only(kept.to(device))


@dataclass(frozen=True)
class StoredCoreset:
    """A coreset as the model sees it, with its head."""

    inputs: Tensor
    targets: Tensor
    head: str | None

    @staticmethod
    def of(task: Task) -> "StoredCoreset":
        return StoredCoreset(task.seen(task.inputs).clone(), task.targets.clone(), task.head)


def joined(kept: Sequence[StoredCoreset], head: str | None) -> Batch | None:
    """All the examples that this head answers, None if there are none."""
    same = [k for k in kept if k.head == head]
    return (torch.cat([k.inputs for k in same]), torch.cat([k.targets for k in same])) if same else None


def _spread(inputs: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Greedy k-center: the chosen rows cover the inputs, each next one at the largest gap."""
    chosen = [int(torch.randint(len(inputs), (1,), generator=generator))]
    gap = (inputs - inputs[chosen[0]]).square().sum(1)
    while len(chosen) < size:
        gap[chosen] = -1.0  # never twice, also among equal inputs
        chosen.append(int(gap.argmax()))
        gap = torch.minimum(gap, (inputs - inputs[chosen[-1]]).square().sum(1))
    return torch.tensor(chosen)
