"""Tempering that follows a schedule: τ from small to one lets training start before the noise is let in.

The learning rate is scheduled by torch's own schedulers.
"""

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from credo.errors import InvalidType, InvalidValue
from credo.optim import arguments

Temper = Callable[[int], float]


class TemperingSchedule:
    """Sets τ in every parameter group after each `step()`: linear from `start` to `end` over `steps`, then `end`.

        schedule = credo.TemperingSchedule(optimizer, start=0.1, end=1.0, steps=1000)
        optimizer.step(closure); schedule.step()

    Or any function of the number of steps taken: `TemperingSchedule(optimizer, function=lambda t: ...)`,
    which must stay in (0, 1]. The first value is set at once.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        start: float = 0.1,  # τ₀
        end: float = 1.0,  # τ₁
        steps: int | None = None,  # T
        *,
        function: Temper | None = None,
    ):
        if not isinstance(optimizer, Optimizer) or "tempering" not in optimizer.param_groups[0]:
            raise InvalidType(
                f"optimizer must be one with a tempering, such as VOGN; got {type(optimizer).__name__}."
            )
        if (steps is None) == (function is None):
            raise InvalidValue("give either steps, for a linear schedule, or function.")
        self._optimizer = optimizer
        self._function = function or linear(start, end, steps)
        self._taken = 0
        self._set(self.value)

    @property
    def value(self) -> float:
        """τ now."""
        return arguments.number("tempering", self._function(self._taken), 0, 1, open_low=True)

    def step(self) -> None:
        """To be called after each optimiser step."""
        self._taken += 1
        try:
            self._set(self.value)
        except (InvalidType, InvalidValue):
            self._taken -= 1
            raise

    def state_dict(self) -> dict[str, int]:
        return {"taken": self._taken}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resumes at the saved step; the schedule itself is the one given here."""
        self._taken = arguments.whole("taken", state_dict["taken"], 0)
        self._set(self.value)

    def _set(self, tempering: float) -> None:
        for group in self._optimizer.param_groups:
            group["tempering"] = tempering


def linear(start: float, end: float, steps: int | None) -> Temper:
    """τ₀ + (τ₁ − τ₀)·min(t/T, 1)."""
    start = arguments.number("start", start, 0, 1, open_low=True)
    end = arguments.number("end", end, 0, 1, open_low=True)
    total = arguments.whole("steps", steps, 1)
    return lambda t: start + (end - start) * min(t / total, 1.0)
