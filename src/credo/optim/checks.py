"""Checks around a step: gradients from elsewhere, replaced layers, a wrong data size, hidden loss scales."""

import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from credo.errors import CallOrderError, NonFiniteError
from credo.optim.gathering import Gathered

MAX_REFUSED = 10  # non-finite steps in a row before it is an error


class Left:
    """The gradients that a step leaves in `.grad`, so that they are known when they are met again."""

    def __init__(self, parameters: Sequence[Tensor] = ()):
        self._held: list[tuple[int, tuple[Any, int]]] = []
        for p in parameters:
            if (grad := p.grad) is not None:
                self._held.append((id(grad), (weakref.ref(grad), grad._version)))

    def knows(self, gradient: Tensor) -> bool:
        """Whether it is one of them, as it was."""
        held, version = self._by_id.get(id(gradient), (lambda: None, -1))
        return held() is gradient and gradient._version == version

    @cached_property
    def _by_id(self) -> dict[int, tuple[Any, int]]:
        """Only asked for where gradients were not cleared."""
        return dict(self._held)


def refuse_foreign_gradients(parameters: list[Tensor], left: Left) -> None:
    """A gradient that no block took belongs to no sample; the last step's own leftovers are dropped in silence."""
    for p in parameters:
        if p.grad is None:
            continue
        if not left.knows(p.grad) and bool(p.grad.any()):
            raise CallOrderError(
                "a parameter holds a gradient that was taken outside a sampled() block, where the weights were "
                "not a sample. Call backward inside the block, or zero_grad() first."
            )


def refuse_replaced(
    module: nn.Module | None, parameters: list[Tensor], names: Callable[[], dict[int, str]]
) -> None:
    """Some parameter has no gradient: one may have been replaced in its module; an unused one is just skipped."""
    if module is None:
        return
    present = {id(p) for p in module.parameters()}
    gone = [names()[id(p)] for p in parameters if id(p) not in present]
    if gone:
        raise CallOrderError(
            f"parameter {gone[0]!r} no longer belongs to the model: a layer was replaced. Construct the optimiser "
            "after changing the model."
        )


def warn_of_small_data(examples: int, data_size: int) -> None:
    warnings.warn(
        f"a batch has {examples} examples, more than data_size={data_size}. data_size is the number of training "
        "examples, not of batches.",
        stacklevel=5,
    )


def require_gradients() -> None:
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        raise CallOrderError(
            "gradients are switched off (no_grad or inference_mode) around a sampling block."
        )


def loss_scales(optimizer: Optimizer, declared: float | None) -> tuple[float, float]:
    """What the loss was multiplied by, as it still is in `.grad`, and as it is in the squares.

    A GradScaler sets `found_inf` and `grad_scale` on the optimiser around a step; the latter is None if it
    has unscaled the gradients before.
    """
    if not hasattr(optimizer, "found_inf"):
        return declared or 1.0, declared or 1.0
    scale = getattr(optimizer, "grad_scale", None)
    if scale is not None:
        return float(scale), float(scale)
    if declared is None:
        raise CallOrderError(
            "a GradScaler has unscaled the gradients before the step, but not their squares. Declare the scale "
            "where the gradients are taken: with optimizer.sampled(scale=scaler.get_scale())."
        )
    return 1.0, declared


def require_samples(gathered: Gathered, wanted: int) -> None:
    """A step needs as many samples as were asked for."""
    if gathered.samples == 0:
        raise CallOrderError(
            "no gradient sample was taken. Wrap forward and backward in `with optimizer.sampled():`, or pass a "
            "closure to step."
        )
    if gathered.samples != wanted and not gathered.vectorized:
        raise CallOrderError(
            f"{gathered.samples} sample(s) were taken where mc_samples={wanted}. Open that many sampled() blocks with "
            "a backward pass in each, or pass a closure to step."
        )


def count_refused(counters: dict[str, int]) -> None:
    """A non-finite step is counted and forgotten; too many in a row are an error."""
    counters["refused"] += 1
    counters["refused_in_a_row"] += 1
    if counters["refused_in_a_row"] >= MAX_REFUSED:
        raise NonFiniteError(
            f"{MAX_REFUSED} steps in a row had a non-finite loss, gradient or squared gradient and were refused. "
            "The mean is the last good one. Lower lr, raise damping, or look at the data; diagnostics() may help."
        )
