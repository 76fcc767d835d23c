"""A task: data to learn from, data to be tested on, and the head that answers."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from credo.errors import InvalidType, InvalidValue

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
