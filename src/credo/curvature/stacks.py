"""Parameters with many values at once, so that many weight samples cost little more than one.

Two arrangements. *Slices*: the batch is cut into as many slices as there are samples, and each slice
sees its own. *Vectorised*: every sample sees the whole batch, under `torch.vmap`; inside an operation
the samples are folded into the examples, (K, M, …) → (K·M, …), and are slices again.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from credo.curvature.arrangement import Watch
from credo.curvature.operation import Operation
from credo.curvature.provenance import Source
from credo.curvature.rules import Generic, Sliced
from credo.curvature.rules.linear import Linear
from credo.curvature.rules.normalisation import BatchNorm
from credo.curvature.rules.shared_input import SharedInputLinear
from credo.curvature.vectorised import by_one_run, physically, refuse_backward
from credo.errors import EmptyBatch, UnsupportedOperation
from credo.kernels.scratch import give_back


class Stacks:
    """`weights`: id of a parameter → (S, *shape). Parameters that are not in it have one value."""

    def __init__(self, weights: dict[int, Tensor], samples: int):
        self._weights, self._samples = weights, samples
        self._at_once = False  # whether a closure is running under vmap

    def __del__(self) -> None:
        give_back(self._weights.values())  # for the next step; a graph that still has them can run no more

    def vectorised(self, closure: Callable[[], Tensor]) -> Tensor:
        """The closure's losses for all samples, (K, M) or (K,), by one run of it."""
        self._at_once = True
        try:
            losses: Tensor = by_one_run(closure, self._samples)
        finally:
            self._at_once = False
        return losses

    def apply(self, operation: Operation, sources: tuple[Source | None, ...], watch: Watch) -> Any:
        """Runs a watched operation with each example's own weights."""
        if operation.lead == 0:
            raise EmptyBatch("the batch is empty: there is no example to give a sample to. Skip it.")
        if not self._at_once:
            return watch(self._slice(operation, sources), sources)
        if isinstance(operation, (Generic, BatchNorm)):
            raise UnsupportedOperation(
                f"{operation.name} has no vectorised form that equals one sample after the other. Use "
                "vectorized=False."
            )

        def physical(tensors: tuple[Any, ...], dims: tuple[int | None, ...]) -> Any:
            if self._is_shared_input(operation, tensors, dims):
                weights, biases = (self._weights.get(id(t)) for t in tensors[1:])
                return watch(SharedInputLinear(tensors, weights, biases), sources)  # type: ignore[arg-type]
            twin = operation.on(
                [self._fold(operation, *column) for column in zip(tensors, dims, sources, strict=True)]
            )
            twin.lead, twin.merged_from = operation.lead * self._samples, None
            return watch(self._slice(twin, sources), sources)

        return physically(physical, operation.tensors, operation.axis)

    def _is_shared_input(
        self, operation: Operation, tensors: tuple[Any, ...], dims: tuple[int | None, ...]
    ) -> bool:
        """A linear layer on rows that all samples see, which need no gradient: the first layer."""
        first = isinstance(operation, Linear) and dims[0] is None and operation.axis == 0
        rows = first and tensors[0].dim() == 2 and not tensors[0].requires_grad
        return rows and all(t is None or id(t) in self._weights for t in tensors[1:])

    def _fold(self, operation: Operation, tensor: Any, dim: int | None, source: Source | None) -> Any:
        """(K, M, …) → (K·M, …) for data; what all samples share is repeated."""
        axis = operation.axis
        if tensor is None or source is not None:
            return tensor
        if dim is not None:
            return tensor.movedim(dim, axis).flatten(axis, axis + 1)
        if tensor.dim() <= axis or tensor.shape[axis] != operation.lead:
            return tensor
        repeated = tensor.unsqueeze(axis).expand(*tensor.shape[:axis], self._samples, *tensor.shape[axis:])
        return repeated.flatten(axis, axis + 1)

    def refuse_backward(self) -> None:
        if self._at_once:
            refuse_backward()

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
