"""How far a training has come, as its loss shows it: what the noise of the default rule follows.

In the first passes over the data the training loss is the test loss, and noise only costs time. A training loss far
below where it began is another matter: the network learns its examples by heart, and noise is what holds it back. So
the noise grows by the number of passes while the loss is low, and shrinks twice as fast while it is not; it settles
where the network can just learn what it is shown.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

FIRST = 20  # losses that say where a training began
LOW = 0.45  # of that loss: examples begin to be learnt by heart
PASSES = 3.0  # over the data, in which the noise has grown by what it was at first
LARGEST_GROWTH = 20.0
LONGEST = 0.3  # of a pass that one step counts as: large batches have few steps to learn in
SLOWEST = 0.02  # weight of the newest loss in the mean, at least


@dataclass
class Progress:
    """`growth` is what the noise is multiplied by. All of it is part of an optimiser's saved state."""

    losses: int = 0
    first: float = 0.0  # mean of the first ones
    mean: float = 0.0  # of the last ones
    growth: float = 1.0

    def follow(self, loss: float | None, passes: float) -> None:
        """After a step over so many passes; without a loss nothing is known, and nothing changes."""
        if loss is None:
            return
        share = min(passes, LONGEST)
        self.losses += 1
        self.mean += max(1 / self.losses, share, SLOWEST) * (loss - self.mean)
        if self.losses <= FIRST:
            self.first += (loss - self.first) / self.losses
            return
        change = share / PASSES if self.mean < LOW * self.first else -2 * share / PASSES
        self.growth = min(max(self.growth + change, 1.0), LARGEST_GROWTH)

    def state(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> "Progress":
        """From a saved state, which may be older than this."""
        return cls(**saved.get("progress", {}))
