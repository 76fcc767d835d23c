"""The learning rate as a function of the step, and the tempering's schedule.

A function of the step alone has no state to save, so a resumed run cannot get it wrong.
"""

import math
from dataclasses import dataclass

from torch.optim import Optimizer

from credo.errors import InvalidValue
from credo.experiments.recipe import Training
from credo.optim import TemperingSchedule


@dataclass(frozen=True)
class LearningRate:
    """Linear from `start` to `peak` over the warm-up (gradual warm-up), then × `decay` at each milestone.

    With `cosine_end` also × ½(1 + cos πt), t from 0 at the end of the warm-up to 1 at that step.
    """

    peak: float
    start: float
    warmup: float  # steps
    milestones: tuple[int, ...]  # steps
    decay: float
    cosine_end: int | None = None  # step

    def at(self, step: int) -> float:
        """α of the step that comes after `step` steps."""
        passed = sum(step >= milestone for milestone in self.milestones)
        scale = self.decay**passed
        if step >= self.warmup:
            return self.peak * scale * self._cosine(step)
        return (self.start + (self.peak - self.start) * step / self.warmup) * scale

    def _cosine(self, step: int) -> float:
        if self.cosine_end is None:
            return 1.0
        passed = (step - self.warmup) / (self.cosine_end - self.warmup)
        return 0.5 * (1 + math.cos(math.pi * min(passed, 1.0)))

    def set(self, optimizer: Optimizer, step: int) -> None:
        for group in optimizer.param_groups:
            group["lr"] = self.at(step)


def learning_rate(training: Training, optimizer: Optimizer, steps_per_epoch: int) -> LearningRate:
    """Milestones and warm-up are counted in epochs in a recipe, in steps from here on."""
    return LearningRate(
        peak=float(optimizer.defaults["lr"]),
        start=training.warmup_from,
        warmup=training.warmup_epochs * steps_per_epoch,
        milestones=tuple(epoch * steps_per_epoch for epoch in training.milestones),
        decay=training.decay,
        cosine_end=training.epochs * steps_per_epoch if training.cosine else None,
    )


def tempering(training: Training, optimizer: Optimizer, steps_per_epoch: int) -> TemperingSchedule | None:
    """τ linear from `tempering_from` to settings["tempering"] over `tempering_epochs`; None if it is constant."""
    if training.tempering_from is None:
        return None
    if "tempering" not in optimizer.param_groups[0]:
        raise InvalidValue(
            f"tempering_from={training.tempering_from} is for methods with a tempering; {training.method!r} has none."
        )
    steps = round(training.tempering_epochs * steps_per_epoch)
    if steps < 1:
        raise InvalidValue(f"tempering_epochs must be above 0, got {training.tempering_epochs!r}.")
    return TemperingSchedule(
        optimizer, start=training.tempering_from, end=optimizer.defaults["tempering"], steps=steps
    )
