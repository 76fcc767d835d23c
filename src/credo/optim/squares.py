"""Blocks that see the squared gradients: one sample in place, several for slices, or all samples at once."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor

from credo.curvature.capture import watching
from credo.curvature.stacks import Stacks
from credo.curvature.statistics import Statistics
from credo.errors import InvalidValue
from credo.optim import arguments
from credo.optim.base import BayesianOptimizer
from credo.optim.gathering import GatheredSquares
from credo.optim.hooks import profiler_runs
from credo.optim.losses import finish_closure
from credo.optim.shards import ElementShards


class SquaresOptimizer(BayesianOptimizer):
    """An optimiser whose update needs the mean of squared per-example gradients."""

    _gathered: GatheredSquares
    _shards: ElementShards

    @abstractmethod
    def _draw(self, draw: int) -> None:
        """Turns the mean in the parameters into sample number `draw`, in place."""

    @abstractmethod
    def _stacks(self, draw: int, samples: int) -> Stacks:
        """The samples number draw, draw + 1, … side by side; the parameters keep the mean."""

    @final
    def zero_grad(self, set_to_none: bool = True) -> None:
        """torch's, but no name for a profiler that does not run; a block need not see the many small questions."""
        with torch._C.DisableTorchFunction():
            if not set_to_none or profiler_runs():
                super().zero_grad(set_to_none)
            for group in self.param_groups if set_to_none else ():
                for p in group["params"]:
                    p.grad = None

    @final
    @contextmanager
    def _sample(self, parameters: list[Tensor]) -> Iterator[Statistics]:
        """The weights are a sample, in place; or, with slices, several that the operations choose from."""
        slices, draw = self.settings["mc_slices"], self._stream()
        subjects, reduction = self._subjects(parameters), self.settings["reduction"]
        if slices > 1:
            with watching(subjects, reduction, stacks=self._stacks(draw, slices)) as stats:
                yield stats
        else:
            with self._keeper:
                self._draw(draw)
                with watching(subjects, reduction) as stats:
                    yield stats
        self.counters["draws"] += slices

    @final
    def _run(self, closure: Callable[[], Tensor]) -> Tensor:
        return self._run_at_once(closure) if self.settings["vectorized"] else self._run_in_turn(closure)

    def _run_at_once(self, closure: Callable[[], Tensor]) -> Tensor:
        """All K samples by one run of the closure under torch.vmap; K·M examples of one mean loss."""
        self._refuse_inside("step")
        self._gathered = self._nothing_gathered()
        parameters, samples = self._trainable(), self.settings["mc_samples"]
        stacks = self._stacks(self._stream(), samples)
        for p in parameters:
            p.grad = None
        with watching(self._subjects(parameters), "mean", stacks=stacks) as stats:
            losses = stacks.vectorised(closure)
            loss = finish_closure(losses.flatten() if isinstance(losses, Tensor) else losses, stats, "mean")
        self.counters["draws"] += samples
        self._gather(stats, parameters, [None] * len(parameters), None)
        self._gathered.vectorized = True
        return loss

    @final
    def _nothing_gathered(self) -> GatheredSquares:
        return GatheredSquares()

    @final
    def supply(self, squares: Mapping[Tensor, Tensor], examples: int) -> None:
        """Declares that `.grad` holds the gradient, and gives Σᵢ gᵢ² over `examples`; the next `step()` uses both.

        The deterministic core, for gradients that were not taken in a block.
        """
        arguments.whole("examples", examples, 1)
        for p, square in squares.items():
            if square.shape != p.shape:
                raise InvalidValue(
                    f"squares of shape {tuple(square.shape)} for a parameter of shape {tuple(p.shape)}."
                )
        self._gathered = self._nothing_gathered()
        self._gathered.supply({id(p): square.detach().clone() for p, square in squares.items()}, examples)
