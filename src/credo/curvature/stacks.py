"""Parameters with many values at once, so that many weight samples cost little more than one.

Two arrangements. *Slices*: the batch is cut into as many slices as there are samples, and each slice
sees its own. *Vectorised*: every sample sees the whole batch, under `torch.vmap`; inside an operation
the samples are folded into the examples, (K, M, …) → (K·M, …), and are slices again.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from credo.curvature.operation import Operation
from credo.curvature.provenance import Source
from credo.curvature.rules import Generic, Sliced
from credo.curvature.rules.normalisation import BatchNorm
from credo.errors import CallOrderError, UnsupportedOperation

Watch = Callable[[Operation, tuple[Source | None, ...]], Any]


class Stacks:
    """`weights`: id of a parameter → (S, *shape). Parameters that are not in it have one value."""

    def __init__(self, weights: dict[int, Tensor], samples: int):
        self._weights, self._samples = weights, samples
        self._index: Tensor | None = None  # under vmap, the number of the sample

    def vectorised(self, closure: Callable[[], Tensor]) -> Tensor:
        """The closure's losses for all samples, (K, M) or (K,), by one run of it."""

        def one(index: Tensor) -> Tensor:
            self._index = index
            try:
                return closure()
            finally:
                self._index = None

        losses: Tensor = torch.vmap(one, randomness="different")(torch.arange(self._samples))
        return losses

    def apply(self, operation: Operation, sources: tuple[Source | None, ...], watch: Watch) -> Any:
        """Runs a watched operation with each example's own weights."""
        if self._index is None:
            return watch(self._slice(operation, sources), sources)
        if isinstance(operation, (Generic, BatchNorm)):
            raise UnsupportedOperation(
                f"{operation.name} has no vectorised form that equals one sample after the other. Use "
                "vectorized=False."
            )

        def folded(tensors: list[Any]) -> Any:
            twin = operation.on(tensors)
            twin.lead, twin.merged_from = operation.lead * self._samples, None
            return watch(self._slice(twin, sources), sources)

        data = tuple(source is None for source in sources)
        return Folded.apply(folded, data, operation.lead, operation.axis, self._index, *operation.tensors)  # type: ignore[no-untyped-call]

    def refuse_backward(self) -> None:
        if self._index is not None:
            raise CallOrderError(
                "vectorized=True needs a closure that returns losses without calling backward: all samples run at "
                "once, and the optimiser calls backward for them together."
            )

    def _slice(self, operation: Operation, sources: tuple[Source | None, ...]) -> Operation:
        stacks = {
            k: self._weights[id(s.tensor)]
            for k, s in enumerate(sources)
            if s and id(s.tensor) in self._weights
        }
        data = frozenset(k for k, source in enumerate(sources) if source is None)
        return Sliced(operation, stacks, data, self._samples) if stacks else operation

    def refuse_derived(self, function: Any, parents: list[Source]) -> None:
        if any(id(root) in self._weights for parent in parents for root in parent.roots):
            name = getattr(function, "__name__", str(function))
            raise UnsupportedOperation(
                f"{name} computes with parameters alone, before they meet the examples (a parametrisation, a "
                "transposition), which cannot have different weights for different slices. Use mc_samples without "
                "slices and without vectorized."
            )


class Folded(torch.autograd.Function):
    """Under vmap: folds the samples into the examples, runs the operation there, and unfolds its output."""

    @staticmethod
    def forward(*_: Any) -> Any:
        raise AssertionError("only called under vmap")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing to keep: the gradient goes through the operation that ran."""

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, run: Any, data: Any, lead: int, axis: int, index: Any, *tensors: Any
    ) -> Any:
        samples = info.batch_size
        folded = [
            _fold(t, dim, samples, axis)
            if is_data and t is not None and (dim is not None or _has(t, lead, axis))
            else t
            for t, dim, is_data in zip(tensors, in_dims[5:], data, strict=True)
        ]
        out = run(folded)
        return out.unflatten(axis, (samples, out.shape[axis] // samples)), axis


def _has(tensor: Tensor, lead: int, axis: int) -> bool:
    return tensor.dim() > axis and tensor.shape[axis] == lead


def _fold(tensor: Tensor, dim: int | None, samples: int, axis: int) -> Tensor:
    """(K, M, …) → (K·M, …) along `axis`; what all samples share is repeated."""
    if dim is None:
        stacked = tensor.unsqueeze(axis).expand(*tensor.shape[:axis], samples, *tensor.shape[axis:])
    else:
        stacked = tensor.movedim(dim, axis)
    return stacked.flatten(axis, axis + 1)
