"""Micro-batches that are one batch: several calls of `step`, and one update from what all of them have said.

Micro-batch j has M_j examples. What is a mean over its examples counts M_j / ΣM, what is a sum counts 1: as ranks of a
world are put together, and as one step on the whole batch would have it. All micro-batches of an update are at the same
weight samples, where a method draws weights.
"""

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from credo.curvature.loss_factor import refuse_divided
from credo.curvature.tracking import WatchedParameters
from credo.distributed.reduce import NamedSums, gradients
from credo.errors import CallOrderError, UnsupportedOperation
from credo.optim import arguments, checks
from credo.optim.groups import Grouped
from credo.optim.statistics import StepStatistics


@final
class Held:
    """The sums over the micro-batches so far."""

    def __init__(self) -> None:
        self.batches = 0
        self._examples = 0  # of one sample
        self.first_draw = 0  # of the samples that the micro-batches share
        self._scales = (1.0, 1.0)
        self._sums: list[list[Tensor | None]] = []

    def add(
        self, columns: Sequence[NamedSums], gathered: StepStatistics, scales: tuple[float, float]
    ) -> None:
        if self.batches and scales != self._scales:
            raise CallOrderError(
                f"the loss scale changed from {self._scales[0]:g} to {scales[0]:g} between micro-batches of one "
                "update. "
                "Call scaler.update() after the last of them only."
            )
        examples = gathered.examples // max(gathered.samples, 1)
        weights = [column.unit * (examples if column.is_mean else 1) for column in columns]
        new = [
            [None if value is None else value.detach() * weight for value in column.values]
            for column, weight in zip(columns, weights, strict=True)
        ]
        self._sums = (
            new if not self.batches else [_added(*pair) for pair in zip(self._sums, new, strict=True)]
        )
        self.batches, self._examples, self._scales = self.batches + 1, self._examples + examples, scales

    def give(self, columns: Sequence[NamedSums], gathered: StepStatistics) -> None:
        """What one batch would have said, into `.grad` and into `gathered`."""
        for column, sums in zip(columns, self._sums, strict=True):
            share = 1 / self._examples if column.is_mean else 1.0
            column.take(column.owners, [None if total is None else total * share for total in sums])
        gathered.examples = self._examples * gathered.samples

    def rewind(self, counters: dict[str, int]) -> None:
        """The next micro-batch is at the same samples."""
        counters["draws"] = self.first_draw

    def state(self) -> dict[str, Any]:
        """For a state dict; nothing if no micro-batch waits."""
        if not self.batches:
            return {}
        own = {"batches": self.batches, "examples": self._examples, "first_draw": self.first_draw}
        return {
            "held": {**own, "scales": list(self._scales), "sums": [list(column) for column in self._sums]}
        }

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> "Held":
        """What was saved, if there was something."""
        held, state = cls(), saved.get("held")
        if state is not None:
            held.batches, held._examples, held.first_draw = (
                state[k] for k in ("batches", "examples", "first_draw")
            )
            held._scales, held._sums = (
                (state["scales"][0], state["scales"][1]),
                [list(c) for c in state["sums"]],
            )
        return held


def _added(before: list[Tensor | None], new: list[Tensor | None]) -> list[Tensor | None]:
    pairs = zip(before, new, strict=True)
    return [b if a is None else a if b is None else a.add_(b) for a, b in pairs]


class Accumulating(Grouped):
    """The part of an optimiser that puts micro-batches together."""

    settings: dict[str, Any]
    counters: dict[str, int]
    _held: Held
    _gathered: StepStatistics
    _watched: WatchedParameters | None

    def accumulate(self, micro_batches: int) -> None:
        """From now on every update is made from so many calls of `step`, each with its own micro-batch.

            optimizer.accumulate(4)
            for x, y in loader:                # micro-batches
                optimizer.step(closure)        # or sampled() and step(); every fourth call updates

        Each loss is the mean (or the sum, as `reduction` says) over its own micro-batch, not divided by anything. The
        update is that of one batch with the examples of all four, whatever their sizes. Leave the accumulation of a
        framework off (accumulate_grad_batches=1, gradient_accumulation_steps=1): gradients that were taken outside a
        block have no squares. `pending()` tells how many micro-batches wait for the rest.
        """
        number = arguments.whole("micro_batches", micro_batches, 1)
        if self._held.batches:
            raise CallOrderError(
                f"{self._held.batches} micro-batches wait for the rest of their update. Change their number after it."
            )
        self.settings["accumulate"] = number

    def pending(self) -> int:
        """How many micro-batches have been seen since the last update."""
        return self._held.batches

    @final
    def _is_update(self, parameters: Sequence[Tensor]) -> bool:
        """Whether what was gathered now is the last micro-batch of an update, and then that of all of them."""
        wanted, gathered = self.settings["accumulate"], self._gathered
        if not getattr(gathered, "counted", True) and self.settings["reduction"] == "mean":
            raise UnsupportedOperation(
                "the number of examples cannot be read from the operations of this model, and micro-batches are "
                "weighed "
                "by it. Run them as several backward passes of one sampled() block, each with its share of the "
                "mean loss."
            )
        mean_loss = gathered.vectorized or self.settings["reduction"] == "mean"
        if mean_loss and gathered.factors:
            refuse_divided(
                gathered.factors, wanted, set() if self._watched is None else self._watched.factors
            )
        with torch.no_grad():
            columns = [gradients(parameters, mean_loss), *gathered.columns(parameters, mean_loss)]
            self._held.add(columns, gathered, checks.loss_scales(self, gathered.scale))
            self._held.give(columns, gathered)
        if self._held.batches == wanted:
            self._held = Held()
            return True
        if gathered.shares_samples:
            self._held.rewind(self.counters)
        return False
