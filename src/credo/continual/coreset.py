"""Coresets: a few examples of each task that are kept, out of the training data, for a last look before predicting.

They are left out of what the posterior learns from (Nguyen et al. 2018), so that no example counts twice.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from credo.continual.tasks import Batch, Task
from credo.errors import InvalidValue
from credo.optim.arguments import option, whole


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
class Kept:
    """A coreset as the model sees it, with its head."""

    inputs: Tensor
    targets: Tensor
    head: str | None

    @staticmethod
    def of(task: Task) -> "Kept":
        return Kept(task.seen(task.inputs).clone(), task.targets.clone(), task.head)


def joined(kept: Sequence[Kept], head: str | None) -> Batch | None:
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
