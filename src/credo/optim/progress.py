"""How far a training has come, as its loss shows it: what the noise of the default rule follows.

While examples are new, the training loss is the test loss, and noise only costs time. Later the examples repeat. The
training loss then falls further because the network learns its examples by heart, and noise is what holds it back.
So one loss is remembered: the running mean after 3 passes over the data, and 300 steps at least. By then the network
has found most of what generalises. The noise grows with the passes while the loss is well below that level, and shrinks
twice as fast while it is not. It settles where the training loss stays near what the test loss can be.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

FIRST = 20  # losses that say where a training began
SEEN_PASSES, SEEN_STEPS = 3.0, 300  # after both, the running mean is remembered
LOW = 0.7  # of the remembered loss: below it the noise grows
LOWEST_START = 0.1  # of the first losses: so low before those steps, few examples are learnt by heart already
HIGHEST = 0.45  # of the first losses: the noise never grows above it
PASSES = 3.0  # over the data, in which the noise has grown by what it was at first
LARGEST_GROWTH = 20.0
LONGEST = 0.3  # of a pass that one step counts as: large batches have few steps to learn in
SLOWEST = 0.02  # weight of the newest loss in the mean, at least


@dataclass
class Progress:
    """`growth` is what the noise is multiplied by. All of it is part of an optimiser's saved state."""

    losses: int = 0
    passes: float = 0.0
    first: float = 0.0  # mean of the first ones
    mean: float = 0.0  # of the last ones
    seen: float | None = None  # the mean when examples had been seen a few times
    growth: float = 1.0

    def follow(self, loss: float | None, passes: float) -> None:
        """After a step over so many passes; without a loss nothing is known, and nothing changes."""
        if loss is None:
            return
        share = min(passes, LONGEST)
        self.losses += 1
        self.passes += passes
        self.mean += max(1 / self.losses, share, SLOWEST) * (loss - self.mean)
        if self.losses <= FIRST:
            self.first += (loss - self.first) / self.losses
            return
        if self.seen is None and self.losses >= SEEN_STEPS and self.passes >= SEEN_PASSES:
            self.seen = self.mean
        change = share / PASSES if self.mean < self._level() else -2 * share / PASSES
        self.growth = min(max(self.growth + change, 1.0), LARGEST_GROWTH)

    def _level(self) -> float:
        """The loss below which the noise grows."""
        if self.seen is None:
            return LOWEST_START * self.first
        return min(LOW * self.seen, HIGHEST * self.first)

    def state(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> "Progress":
        """From a saved state, which may be older than this."""
        return cls(**saved.get("progress", {}))
