"""Parameters with many values at once, so that many weight samples cost little more than one.

Two arrangements. *Slices*: the batch is cut into as many slices as there are samples, and each slice
sees its own. *Vectorised*: every sample sees the whole batch, under `torch.vmap`; inside an operation
the samples are folded into the examples, (K, M, …) → (K·M, …), and are slices again.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from credo.curvature.arrangement import Watch
from credo.curvature.operation import Operation
from credo.curvature.provenance import Source
from credo.curvature.rules import Generic, Sliced
from credo.curvature.rules.convolution import Convolution
from credo.curvature.rules.linear import Linear
from credo.curvature.rules.normalisation import BatchNorm
from credo.curvature.rules.stacked_convolution import StackedConvolution, as_one_call
from credo.curvature.rules.stacked_linear import StackedLinear
from credo.curvature.vectorised import Level, Placed, is_loss_of_rows, refuse_backward
from credo.errors import EmptyBatch, UnsupportedOperation
from credo.kernels.scratch import expect_large_blocks


class Stacks:
    """`weights`: id of a parameter → (S, *shape). Parameters that are not in it have one value."""

    def __init__(self, weights: dict[int, Tensor], samples: int):
        self._weights, self._samples, self._level = weights, samples, Level(samples)
        expect_large_blocks()

    def vectorised(self, closure: Callable[[], Tensor]) -> Tensor:
        """The closure's losses for all samples, (K, M) or (K,), by one run of it."""
        losses: Tensor = self._level.run(closure)
        return losses

    def run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """A call without parameters, of all samples at once."""
        if self._level.active and is_loss_of_rows(func, args, kwargs):
            return self._level.cross_entropy(args, kwargs)
        return func(*args, **kwargs)

    def apply(self, operation: Operation, sources: tuple[Source | None, ...], watch: Watch) -> Any:
        """Runs a watched operation with each example's own weights."""
        if operation.lead == 0:
            raise EmptyBatch("the batch is empty: there is no example to give a sample to. Skip it.")
        if not self._level.active:
            return watch(self._slice(operation, sources), sources)
        if isinstance(operation, (Generic, BatchNorm)):
            raise UnsupportedOperation(
                f"{operation.name} has no vectorised form that equals one sample after the other. Use "
                "vectorized=False."
            )

        def physical(tensors: tuple[Any, ...], places: tuple[int | None, ...]) -> Placed:
            x, place = tensors[0], places[0]
            common = place is None and x.dim() == 2 and not x.requires_grad  # the first layer
            if (common or (place == 0 and x.dim() == 3)) and self._is_one_product(operation, tensors):
                return watch(self._product(tensors, common), sources), 0
            folded = [self._fold(operation, *column) for column in zip(tensors, places, sources, strict=True)]
            twin = operation.on(folded)
            twin.lead, twin.merged_from = operation.lead * self._samples, None
            out, axis = watch(self._slice(twin, sources), sources), operation.axis
            return out.unflatten(axis, (self._samples, out.shape[axis] // self._samples)), axis

        return self._level.physically(physical, operation.tensors)

    def _is_one_product(self, operation: Operation, tensors: tuple[Any, ...]) -> bool:
        """A linear layer all of whose parameters have many values."""
        return isinstance(operation, Linear) and operation.axis == 0 and self._all_stacked(tensors)

    def _all_stacked(self, tensors: tuple[Any, ...]) -> bool:
        return all(t is None or id(t) in self._weights for t in tensors[1:])

    def _convolution(self, operation: Convolution) -> StackedConvolution | None:
        weights, biases = (self._weights.get(id(t)) for t in operation.tensors[1:])
        assert weights is not None
        return as_one_call(operation, weights, biases)

    def _product(self, tensors: tuple[Any, ...], common: bool = False) -> StackedLinear:
        weights, biases = (self._weights.get(id(t)) for t in tensors[1:])
        assert weights is not None
        return StackedLinear(tensors, weights, biases, common)

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
        if self._level.active:
            refuse_backward()

    def _slice(self, operation: Operation, sources: tuple[Source | None, ...]) -> Operation:
        """The operation with as many weights as there are slices; one product, or one call of a kernel, if it can."""
        x, rows_are_examples = operation.tensors[0], operation.merged_from is None
        if rows_are_examples and x is not None and self._all_stacked(operation.tensors):
            if x.dim() == 2 and self._is_one_product(operation, operation.tensors):
                return self._product(operation.tensors)
            if isinstance(operation, Convolution) and (one_call := self._convolution(operation)):
                return one_call
        stacks = {
            k: self._weights[id(s.tensor)]
            for k, s in enumerate(sources)
            if s and id(s.tensor) in self._weights
        }
        data = frozenset(k for k, source in enumerate(sources) if source is None)
        return Sliced(operation, stacks, data, self._samples) if stacks else operation

    def refuse_left_out(self, counted: int, examples: int) -> None:
        """Any examples may be left out."""

    def refuse_derived(self, function: Any, parents: list[Source]) -> None:
        if any(id(root) in self._weights for parent in parents for root in parent.roots):
            name = getattr(function, "__name__", str(function))
            raise UnsupportedOperation(
                f"{name} computes with parameters alone, before they meet the examples (a parametrisation, a "
                "transposition), which cannot have different weights for different slices. Use mc_samples without "
                "slices and without vectorized."
            )
