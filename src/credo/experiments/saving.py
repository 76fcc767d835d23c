"""When to save: after so many steps or seconds, whichever comes first, also inside an epoch."""

import time
from dataclasses import dataclass

from credo.errors import InvalidValue
from credo.experiments.checkpoint import Checkpoints
from credo.experiments.state import RunState


@dataclass(frozen=True)
class Checkpointing:
    """A crash costs at most this much work."""

    steps: int | None = None
    seconds: float | None = 30.0
    keep: int = 2  # of the newest checkpoints

    def __post_init__(self) -> None:
        if self.keep < 2 or (self.steps is not None and self.steps < 1):
            raise InvalidValue(
                f"keep={self.keep} must be at least 2, steps={self.steps} at least 1 or None: the last good checkpoint "
                "must be there while the next is written."
            )


class Saver:
    def __init__(self, checkpoints: Checkpoints, state: RunState, policy: Checkpointing) -> None:
        self.checkpoints, self._state, self._policy = checkpoints, state, policy
        self._saved_at_step, self._saved_at = 0, time.monotonic()

    def is_due(self) -> bool:
        """By this rank's clock: ranks must agree before they save."""
        steps, seconds = self._policy.steps, self._policy.seconds
        return (steps is not None and self._state.step - self._saved_at_step >= steps) or (
            seconds is not None and time.monotonic() - self._saved_at >= seconds
        )

    def save(self) -> None:
        """All ranks tell what is theirs; rank 0 writes, and its errors are everybody's."""
        epoch, step, state = self._state.epoch, self._state.step, self._state.state_dict()
        self._state.ranks.once(lambda: self.checkpoints.save(epoch, step, state).name)
        self._saved_at_step, self._saved_at = self._state.step, time.monotonic()
