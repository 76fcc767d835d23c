"""What the samples since the last update have said: how many there were, and the sums of their squares."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

from credo.curvature.statistics import Statistics


@dataclass
class Gathered:
    """Sums over the samples of one step; `squares` holds Σₖ Σᵢ rᵢ² by the parameter's id, times `_unit`."""

    samples: int = 0
    examples: int = 0  # of all samples together
    squares: dict[int, Tensor] = field(default_factory=dict)
    unit: float = 1.0  # ĥ of one sample = unit · Σᵢ rᵢ²
    scale: float | None = None  # what the losses were multiplied by, where it was declared
    vectorized: bool = False  # all samples of the step at once, under a mean loss

    def add(self, stats: Statistics, parameters: Iterable[Tensor], scale: float | None) -> None:
        """Adds one sample. Its ĥ is the mean over its own examples, so samples count alike."""
        unit = stats.factor / stats.examples
        ratio = unit / self.unit if self.samples else 1.0
        self.unit = self.unit if self.samples else unit
        for parameter in parameters:
            raw = stats.raw(parameter)
            if raw is not None:
                self._add_one(id(parameter), raw if ratio == 1.0 else raw * ratio)
        self.samples += 1
        self.examples += stats.examples
        self.scale = scale

    def _add_one(self, key: int, raw: Tensor) -> None:
        if key in self.squares:
            self.squares[key] += raw
        else:
            self.squares[key] = raw
