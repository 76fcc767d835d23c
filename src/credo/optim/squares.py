"""Blocks that see the squared gradients: one sample in place, several for slices, or all samples at once."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import final

from torch import Tensor

from credo.curvature.capture import Statistics, watching
from credo.curvature.many_samples import StackedWeights
from credo.curvature.torch_private import DisableTorchFunction
from credo.errors import CredoError, InvalidValue, UnsupportedOperation
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
    def _stacks(self, draw: int, samples: int) -> StackedWeights:
        """The samples number draw, draw + 1, … side by side; the parameters keep the mean."""

    @final
    def zero_grad(self, set_to_none: bool = True) -> None:
        """torch's, but no name for a profiler that does not run; a block need not see the many small questions."""
        with DisableTorchFunction():
            if not set_to_none or profiler_runs():
                super().zero_grad(set_to_none)
            for group in self.param_groups if set_to_none else ():
                for p in group["params"]:
                    p.grad = None

    @final
    def _sample(self, parameters: list[Tensor]) -> AbstractContextManager[Statistics]:
        return _Sample(self, parameters)

    @final
    def _run(self, closure: Callable[[], Tensor]) -> Tensor:
        return self._run_at_once(closure) if self.settings["vectorized"] else self._run_in_turn(closure)

    def _run_at_once(self, closure: Callable[[], Tensor]) -> Tensor:
        """All K samples by one run of the closure under torch.vmap; K·M examples of one mean loss."""
        self._refuse_inside("step")
        self._gathered = self._nothing_gathered()
        parameters, samples = self._trainable(), self.settings["mc_samples"]
        with self._keeper:  # parameters without noise may be moved
            stacks = self._stacks(self._stream(), samples)
            for p in parameters:
                p.grad = None
            with watching(self._subjects(parameters), "mean", stacks=stacks, samples=samples) as stats:
                loss = _vectorised(stacks, closure, stats)
        self.counters["draws"] += samples
        self._gather(stats, parameters, None, None)
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


def _vectorised(stacks: StackedWeights, closure: Callable[[], Tensor], stats: Statistics) -> Tensor:
    try:
        losses = stacks.vectorised(closure)
        return finish_closure(losses.flatten() if isinstance(losses, Tensor) else losses, stats, "mean")
    except CredoError:
        raise
    except RuntimeError as error:
        raise UnsupportedOperation(
            f"the closure fails under torch.vmap, in which vectorized=True runs it for all samples: {error}. Use "
            "vectorized=False, which runs it for one sample after the other."
        ) from error


@final
class _Sample(AbstractContextManager[Statistics]):
    """The weights are a sample, in place; or, with slices, several that the operations choose from."""

    def __init__(self, optimizer: SquaresOptimizer, parameters: list[Tensor]):
        self._optimizer, self._parameters = optimizer, parameters
        self._slices: int = optimizer.settings["mc_slices"]

    def __enter__(self) -> Statistics:
        own, stacks = self._optimizer, None
        draw, subjects = own._stream(), own._subjects(self._parameters)
        try:
            if self._slices > 1:
                stacks = own._stacks(draw, self._slices)
            else:
                own._draw(draw)
            self._watching = watching(subjects, own.settings["reduction"], stacks=stacks)
            return self._watching.__enter__()
        except BaseException:
            own._keeper.__exit__()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        own = self._optimizer
        try:
            self._watching.__exit__(kind, error, trace)
        finally:
            own._keeper.__exit__()
        if kind is None:
            own.counters["draws"] += self._slices
