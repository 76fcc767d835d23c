"""What the samples since the last update have said: how many there were, and sums over them."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, final

import torch
from torch import Tensor

from credo.curvature.capture import Statistics
from credo.kernels.update import all_finite
from credo.optim.columns import Column, gradients, tabled
from credo.optim.shards import Shards
from credo.optim.sharing import add_up


class Seen(Protocol):
    """What the backward passes of one block have said."""

    @property
    def examples(self) -> int:
        """How many examples went back; 0 as long as there was no backward pass."""

    @property
    def counted(self) -> bool:
        """Whether that number is exact; else it is 1 for each backward pass."""

    @property
    def loss(self) -> Tensor | None:
        """What went back, if it was one number: the sum over the backward passes."""


class Gathered(ABC):
    """Sums over the samples of one step."""

    samples = 0
    examples = 0  # of all samples together
    scale: float | None = None  # what the losses were multiplied by, where it was declared
    loss: Tensor | None = None  # of the step, where it has one
    gradient_scale = 1.0  # what the loss was multiplied by, as it still is in `.grad`,
    squares_scale = 1.0  # and as it is in what was gathered
    likelihood = False  # whether the loss was a log-likelihood
    losses: tuple[Tensor, ...] = ()  # of the samples, as far as they were single numbers
    vectorized = False  # all samples of the step at once, under a mean loss
    shares_samples = (
        True  # whether a sample is of weights, which all micro-batches of an update then have in common
    )

    @final
    def add(self, seen: Seen, parameters: Sequence[Tensor], examples: int, scale: float | None) -> None:
        """Adds one sample of so many examples, whose own gradient is in `.grad`."""
        self._add(seen, parameters, examples)
        self.samples += 1
        self.examples += examples
        self.scale = scale
        self.losses += () if seen.loss is None else (seen.loss.detach(),)

    @final
    def mean_loss(self) -> Tensor | None:
        """Of the samples; None where one of them is not known."""
        known = self.losses and len(self.losses) == self.samples
        return torch.stack([loss.double() for loss in self.losses]).mean() if known else None

    @final
    def gradient_unit(self, reduction: str) -> float:
        """ĝ = unit · `.grad`: undoes the number of samples, of examples under a sum, and the loss scale."""
        mean_loss = reduction == "mean" or self.vectorized
        return 1 / (self.samples * (1 if mean_loss else self.examples / self.samples) * self.gradient_scale)

    @final
    def at_once(self) -> None:
        """The blocks were parts of one mean loss over all samples."""
        self.samples, self.vectorized = 1, True

    @final
    def share(
        self,
        shards: Shards,
        parameters: Sequence[Tensor],
        settings: Mapping[str, Any],
        counters: dict[str, int],
        loss: Tensor | None,
    ) -> Tensor | None:
        """Each rank's sums become those of the whole batch; the loss is then that of all examples."""
        at_once = self.vectorized or bool(settings.get("vectorized"))
        mean_loss = settings["reduction"] == "mean" or at_once
        counted = add_up(
            shards,
            parameters,
            [gradients(parameters, mean_loss), *self.columns(parameters, mean_loss)],
            self.examples / max(self.samples, 1),
            None if loss is None else float(loss),
            mean_loss,
            counters,
        )
        self.vectorized, self.samples = at_once, 1 if at_once else settings["mc_samples"]
        self.examples = round(counted.examples * self.samples)
        counters["draws"] = counted.draws
        if counted.loss is None:
            return None
        return (parameters[0] if loss is None else loss).new_tensor(counted.loss)

    @final
    def finite(self, parameters: Sequence[Tensor], loss: Tensor | None) -> bool:
        """Whether the loss, all gradients and all sums are."""
        numbers = [p.grad for p in parameters if p.grad is not None]
        numbers += [] if loss is None else [loss]
        return all_finite([*numbers, *self.tensors(parameters)])

    @abstractmethod
    def _add(self, seen: Seen, parameters: Sequence[Tensor], examples: int) -> None:
        """Adds what this method wants to know of one sample."""

    @abstractmethod
    def columns(self, parameters: Sequence[Tensor], mean_loss: bool) -> list[Column]:
        """What the ranks of a world must add up, beside the gradients; the same places on all of them."""

    @abstractmethod
    def by_parameter(self) -> Iterable[tuple[int, Tensor]]:
        """The ids of parameters with what was gathered of each, beside its gradient."""

    @abstractmethod
    def tensors(self, parameters: Sequence[Tensor]) -> Iterable[Tensor]:
        """Everything that must be finite, beside the gradients of the parameters."""


@final
class GatheredSquares(Gathered):
    """`squares` holds Σₖ Σᵢ rᵢ² by the parameter's id; the ĥ of one sample is `unit` times its Σᵢ rᵢ²."""

    unit = 1.0
    supplied = False  # whether the gradient was taken at the parameters, by whoever supplied it

    def __init__(self) -> None:
        self.squares: dict[int, Tensor] = {}

    def _add(self, seen: Seen, parameters: Sequence[Tensor], examples: int) -> None:
        """ĥ is the mean over a sample's own examples, so samples count alike."""
        assert isinstance(seen, Statistics)
        self.likelihood = seen.likelihood
        sums, factor = seen.raw()
        unit = factor / examples
        if not self.samples:
            self.squares, self.unit = dict(sums), unit
            return
        for key, raw in sums.items():
            own = raw if unit == self.unit else raw * (unit / self.unit)
            if key in self.squares:
                self.squares[key] += own
            else:
                self.squares[key] = own

    def columns(self, parameters: Sequence[Tensor], mean_loss: bool) -> list[Column]:
        """ĥ, which is a mean over the examples whatever the loss is; its unit is 1 from then on."""
        unit, self.unit = self.unit, 1.0
        return [tabled(self.squares, parameters, True, unit)]

    def supply(self, squares: dict[int, Tensor], examples: int) -> None:
        """Squares that were not taken in a block: one sample of `examples`."""
        self.samples, self.examples, self.squares = 1, examples, squares
        self.unit, self.vectorized, self.supplied = 1 / examples, True, True

    def by_parameter(self) -> Iterable[tuple[int, Tensor]]:
        return self.squares.items()

    def tensors(self, parameters: Sequence[Tensor]) -> Iterable[Tensor]:
        return self.squares.values()
