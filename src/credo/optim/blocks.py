"""Blocks in which the weights are a sample, what closures return in them, and torch's hooks around a step."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, cast, final

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from credo.curvature.accumulate import SquareAccumulator
from credo.curvature.many_samples import StackedWeights
from credo.curvature.torch_private import DisableTorchFunction
from credo.errors import CallOrderError, CredoError, InvalidType, InvalidValue, UnsupportedOperation
from credo.optim import checks
from credo.optim.statistics import Observation

if TYPE_CHECKING:
    from credo.optim.base import BayesianOptimizer

Step = TypeVar("Step", bound=Callable[..., Any])
profiler_runs: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]


@final
class Block(AbstractContextManager[Observation]):
    """One sample of a step: a block in which the weights are that sample, and whose backward passes are seen.

    Gradients begin at none in it. If it fails they are what they were before; else the sums over samples so far.
    """

    def __init__(self, optimizer: "BayesianOptimizer", scale: float | None):
        self._open = False
        self._optimizer, self._scale, self._token = optimizer, scale, object()

    def __enter__(self) -> Observation:
        own = self._optimizer
        if own._inside is not None:
            own._refuse_inside("open a sampling block")
        if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            raise CallOrderError(
                "gradients are switched off (no_grad or inference_mode) around a sampling block."
            )
        self._parameters = own._trainable()
        self._before = [p.grad for p in self._parameters] if own._gathered.samples else None
        try:
            self._open, own._block, own._inside = True, self._token, threading.get_ident()
            for p in self._parameters:
                p.grad = None
            self._draws = own._draw(own._stream())
            self._watching = own._observe(self._parameters)
            self._seen = self._watching.__enter__()
            return self._seen
        except BaseException:
            self._give_up()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        own, examples = self._optimizer, -1
        try:
            try:
                self._watching.__exit__(kind, error, trace)
            finally:
                own._end_block()
            if kind is None:
                own.counters["draws"] += self._draws
                examples = own._gather(self._seen, self._parameters, self._before, self._scale)
        finally:  # also after an interrupt: nobody else would open the optimiser again
            self._open, own._inside = False, None
            if examples < 0:
                self._give_up()
        if examples > own.settings["data_size"] and not own._warned:
            checks.warn_of_small_data(examples, own.settings["data_size"])
            own._warned = True

    def __del__(self) -> None:
        # An interrupt came before the end could; unless a traceback has kept this one until after the next was opened.
        if self._open and self._optimizer._block is self._token:
            self._give_up()

    def _give_up(self) -> None:
        own = self._optimizer
        own._end_block()
        self._open, own._inside = False, None
        if not own._gathered.samples:  # it may have been on the way to become the first
            own._gathered = own._nothing_gathered()
        for k, p in enumerate(self._parameters):
            p.grad = None if self._before is None else self._before[k]


def finish_closure(returned: Any, seen: Observation, reduction: str) -> Tensor:
    """The loss as one detached number; runs the backward pass if the closure left it to the optimiser."""
    if not isinstance(returned, Tensor):
        raise InvalidType(
            f"the closure must return the loss as a tensor, got {type(returned).__name__}: "
            "call loss.backward() in it and return loss, not loss.item()."
        )
    loss = returned
    if seen.examples:  # the closure has called backward
        with DisableTorchFunction():  # a block need not see this
            if loss.numel() == 1:
                return loss.detach() if loss.dim() == 0 else loss.detach().reshape(())
        raise InvalidValue(
            f"the closure called backward and returned a loss of shape {tuple(loss.shape)}, not one number."
        )
    if not loss.requires_grad:
        raise InvalidValue(
            f"the closure did not call backward, and the loss of shape {tuple(loss.shape)} it returned has no graph. "
            "Return losses computed by the model inside the closure."
        )
    return _backward(loss, seen, reduction)


def finish_at_once(stacks: StackedWeights, closure: Callable[[], Tensor], stats: SquareAccumulator) -> Tensor:
    """The mean of the losses of all samples of a step, by one run of the closure."""
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


def _backward(loss: Tensor, seen: Observation, reduction: str) -> Tensor:
    """One loss an example, or their mean or sum, as the optimiser's `reduction` says."""
    if loss.dim() > 1:
        raise InvalidValue(
            f"the closure must return one loss an example, shape (M,), or one number; got {tuple(loss.shape)}."
        )
    total = loss if loss.dim() == 0 else loss.mean() if reduction == "mean" else loss.sum()
    total.backward()  # type: ignore[no-untyped-call]
    rows = getattr(seen, "rows", seen.examples)
    if loss.dim() == 1 and seen.counted and rows not in (0, len(loss)):
        raise InvalidValue(f"the closure returned {len(loss)} losses for a batch of {rows} examples.")
    return total.detach()


def hooked(step: Step) -> Step:
    """For the `step` of an optimiser. torch would wrap it at construction; a name that nobody reads takes a while."""
    watched = Optimizer.profile_hook_step(step)

    @wraps(step)
    def run(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if (
            self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or _global_optimizer_pre_hooks
            or _global_optimizer_post_hooks
            or profiler_runs()
        ) and type(
            self
        ).step is run:  # a subclass's own step has been wrapped by torch, and hooks must not run twice
            return watched(self, *args, **kwargs)
        return step(self, *args, **kwargs)

    run.hooked = True  # type: ignore[attr-defined]  # which torch asks for
    return cast(Step, run)
