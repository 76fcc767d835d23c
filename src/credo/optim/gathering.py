"""What the samples since the last update have said: how many there were, and sums over them."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Protocol, final

from torch import Tensor

from credo.curvature.statistics import Statistics
from credo.optim.sharing import Slot


class Seen(Protocol):
    """What the backward passes of one block have said."""

    @property
    def examples(self) -> int:
        """How many examples went back; 0 as long as there was no backward pass."""

    @property
    def counted(self) -> bool:
        """Whether that number is exact; else it is 1 for each backward pass."""


class Gathered(ABC):
    """Sums over the samples of one step."""

    def __init__(self) -> None:
        self.samples = 0
        self.examples = 0  # of all samples together
        self.scale: float | None = None  # what the losses were multiplied by, where it was declared
        self.vectorized = False  # all samples of the step at once, under a mean loss

    @final
    def add(self, seen: Seen, parameters: Sequence[Tensor], scale: float | None) -> None:
        """Adds one sample, whose own gradient is in `.grad`."""
        self._add(seen, parameters)
        self.samples += 1
        self.examples += seen.examples
        self.scale = scale

    @abstractmethod
    def _add(self, seen: Seen, parameters: Sequence[Tensor]) -> None:
        """Adds what this method wants to know of one sample."""

    @abstractmethod
    def slots(self, parameters: Sequence[Tensor], mean_loss: bool) -> list[Slot]:
        """What the ranks of a world must add up, beside the gradients; the same places on all of them."""

    @abstractmethod
    def tensors(self) -> Iterable[Tensor]:
        """Everything that must be finite."""


@final
class GatheredSquares(Gathered):
    """`squares` holds Σₖ Σᵢ rᵢ² by the parameter's id; the ĥ of one sample is `unit` times its Σᵢ rᵢ²."""

    def __init__(self) -> None:
        super().__init__()
        self.squares: dict[int, Tensor] = {}
        self.unit = 1.0
        self._seen: list[Seen] = []  # whose memory the squares are in

    def _add(self, seen: Seen, parameters: Sequence[Tensor]) -> None:
        """ĥ is the mean over a sample's own examples, so samples count alike."""
        assert isinstance(seen, Statistics)
        self._seen.append(seen)
        unit = seen.factor / seen.examples
        ratio = unit / self.unit if self.samples else 1.0
        self.unit = self.unit if self.samples else unit
        for parameter in parameters:
            raw = seen.raw(parameter)
            if raw is not None:
                self._add_one(id(parameter), raw if ratio == 1.0 else raw * ratio)

    def _add_one(self, key: int, raw: Tensor) -> None:
        if key in self.squares:
            self.squares[key] += raw
        else:
            self.squares[key] = raw

    def slots(self, parameters: Sequence[Tensor], mean_loss: bool) -> list[Slot]:
        """ĥ, which is a mean over the examples whatever the loss is; its unit is 1 from then on."""
        unit, self.unit = self.unit, 1.0
        return [self._slot(p, unit) for p in parameters]

    def _slot(self, p: Tensor, unit: float) -> Slot:
        raw = self.squares.get(id(p))

        def take(total: Tensor | None) -> None:
            if total is not None:
                self.squares[id(p)] = total

        return Slot(p.shape, None if raw is None else raw * unit, True, take)

    def supply(self, squares: dict[int, Tensor], examples: int) -> None:
        """Squares that were not taken in a block: one sample of `examples`."""
        self.samples, self.examples, self.squares = 1, examples, squares
        self.unit, self.vectorized = 1 / examples, True

    def tensors(self) -> Iterable[Tensor]:
        return self.squares.values()
