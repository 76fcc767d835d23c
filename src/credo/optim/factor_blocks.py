"""Blocks that see Kronecker factors when these are due, and nothing but the gradient otherwise."""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import final

import torch
from torch import Tensor

from credo.curvature.kronecker import FactorStatistics, watching_factors
from credo.errors import CallOrderError
from credo.optim.base import BayesianOptimizer
from credo.optim.eyes import Onlooker
from credo.optim.fisher import check_outputs, private_generator, sampled_loss
from credo.optim.gathered_factors import Expected, GatheredFactors
from credo.optim.gathering import Seen
from credo.optim.layer_shards import LayerShards
from credo.optim.layouts import layers_of_all


class FactorOptimizer(BayesianOptimizer):
    """An optimiser whose curvature is looked at every `factor_interval` steps."""

    _gathered: GatheredFactors
    _shards: LayerShards
    _kind_of_shards = LayerShards
    _statistics: FactorStatistics | None = None  # of the block that is open, if it sees factors

    @abstractmethod
    def _draw(self, draw: int) -> None:
        """Turns the mean in the parameters into sample number `draw`, in place."""

    @abstractmethod
    def _follow_freezing(self) -> None:
        """Lets what is known of the layers follow parameters that have been frozen since."""

    @abstractmethod
    def _unknown(self) -> list[str]:
        """The names of trainable parameters without any curvature."""

    @final
    @contextmanager
    def _sample(self, parameters: list[Tensor]) -> Iterator[Seen]:
        self._follow_freezing()
        self._shards.draws += 1
        with self._keeper:
            self._draw_over(parameters)
            with self._watch(parameters) as seen:
                self._statistics = seen if isinstance(seen, FactorStatistics) else None
                try:
                    yield seen
                    self._require_observed(seen)
                finally:
                    self._statistics = None
        self.counters["draws"] += 1
        if not seen.examples:
            self._shards.draws -= 1  # a look, which is no part of a step

    def _draw_over(self, parameters: list[Tensor]) -> None:
        self._keeper.keep(parameters)
        with torch.no_grad():
            self._draw(self._stream())

    def _watch(self, parameters: list[Tensor]) -> AbstractContextManager[Seen]:
        subjects, reduction = self._subjects(parameters), self.settings["reduction"]
        if not self._factors_due():
            return Onlooker(subjects, reduction)
        true = self.settings["fisher"] == "true"
        return watching_factors(subjects, reduction, self.settings["sharing"], fisher=true)

    def _factors_due(self) -> bool:
        """Every T_f steps, and where a parameter has joined; not for those that the last refresh did not reach."""
        if is_due(self.counters["step"], self.settings["factor_interval"]):
            return True
        return not set(self._unknown()) <= set(self.settings["idle"])

    @final
    def observe(self, outputs: Tensor, likelihood: str = "categorical") -> None:
        """For fisher="true": shows the model's outputs, before the backward pass of the loss.

        Labels are drawn from them by the private generator and sent back once, through a graph that stays; steps at
        which no factors are due do nothing here. `likelihood`: "categorical" (logits, (M, classes)) or "gaussian"
        (means of unit variance, for half the squared error). Micro-batches are shown one by one.
        """
        if self.settings["fisher"] != "true":
            raise CallOrderError(
                "observe() is for fisher='true'; this optimiser takes the data's labels (fisher='empirical')."
            )
        if self._inside is None:
            raise CallOrderError("observe() belongs inside a sampling block or a closure, before backward.")
        check_outputs(outputs, likelihood)
        if self._statistics is not None:
            key = self.settings["seed"], self._stream(), self._statistics.found().examples
            generator = private_generator(*key, outputs.device)
            self._statistics.observe(sampled_loss(outputs, likelihood, generator), self._trainable())

    def _require_observed(self, seen: Seen) -> None:
        if isinstance(seen, FactorStatistics) and seen.examples and not seen.found().examples:
            raise CallOrderError(
                "fisher='true' needs the model's outputs: call optimizer.observe(outputs) before loss.backward(), and "
                "let the closure call backward itself."
            )

    @final
    def _run(self, closure: Callable[[], Tensor]) -> Tensor:
        return self._run_in_turn(closure)

    @final
    def _nothing_gathered(self) -> GatheredFactors:
        return GatheredFactors(self._expected)

    def _expected(self, own: list[Expected]) -> list[Expected] | None:
        return (
            layers_of_all(self._world, own, self._trainable(), self.names()) if self._factors_due() else None
        )


def is_due(step: int, interval: int) -> bool:
    """Steps 0, T, 2T, …; and 1, 2, 4, … below T, because the first factors are of one minibatch."""
    return step % interval == 0 or (step < interval and step & (step - 1) == 0)
