"""One operation with many weights: every slice of the examples has a sample of its own.

The weights of the slices are stacked, (S, *shape). Only the forward pass and the gradient of the
input see them: for a linear map or a convolution rᵢ depends on x and g alone, so one kernel call
still serves the whole batch. A linear map of equal slices is one batched matrix product.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from credo.curvature.contribution import Contribution
from credo.curvature.operation import Operation, Outputs, Pieces
from credo.curvature.rules.convolution import Convolution, TransposedConvolution
from credo.curvature.rules.embedding import Embedding
from credo.curvature.rules.linear import AddMM, Linear, RightProduct
from credo.curvature.rules.normalisation import BatchNorm
from credo.curvature.rules.recurrent import Recurrent
from credo.errors import UnsupportedOperation

# For these rᵢ is a function of x and g, whatever the weight.
_FREE_OF_WEIGHTS = (Linear, Convolution, TransposedConvolution, RightProduct, AddMM, Embedding)


class Joined(Contribution):
    """The contributions of the slices, one after the other."""

    def __init__(self, parts: list[Contribution]):
        self.examples = sum(part.examples for part in parts)
        self._parts = parts

    def total(self) -> Tensor:
        return _sum([part.total() for part in self._parts])

    def total_and_squares(self) -> tuple[Tensor, Tensor]:
        totals, squares = zip(*(part.total_and_squares() for part in self._parts), strict=True)
        return _sum(list(totals)), _sum(list(squares))

    def per_example(self, start: int, stop: int) -> Tensor:
        rows, first = [], 0
        for part in self._parts:
            low, high = max(start - first, 0), min(stop - first, part.examples)
            if low < high:
                rows.append(part.per_example(low, high))
            first += part.examples
        return torch.cat(rows)


class Sliced(Operation):
    """`operation` cut into slices along its examples; `stacks` has the weights of the slices, slot by slot."""

    def __init__(self, operation: Operation, stacks: dict[int, Tensor], data: frozenset[int], slices: int):
        _refuse(operation)
        self._inner, self._stacks, self._data = operation, stacks, data
        self.tensors, self.parameter_slots = operation.release(), operation.parameter_slots
        self.name, self.axis = operation.name, operation.axis
        self.lead, self.merged_from = operation.lead, operation.merged_from
        self._sizes = _slice_sizes(self.merged_from or self.lead, slices, self.lead)

    def forward(self, *tensors: Tensor | None) -> tuple[Outputs, tuple[Tensor, ...]]:
        if self._as_one_product(tensors):
            return self._batched_linear(*tensors), ()
        parts = [self._inner.on(cut) for cut in self._cut(tensors)]
        outputs = [part.forward(*part.release()) for part in parts]
        if any(extras for _, extras in outputs) or not all(isinstance(out, Tensor) for out, _ in outputs):
            raise UnsupportedOperation(f"{self.name} cannot have different weights for different slices.")
        self._parts = parts
        return torch.cat([out for out, _ in outputs], self.axis), ()  # type: ignore[misc]

    def backward(
        self, grads: tuple[Tensor | None, ...], needed: Sequence[bool], examples: int, saved: Sequence[Tensor]
    ) -> Pieces:
        if not isinstance(self._inner, _FREE_OF_WEIGHTS):
            return self._by_slices(grads, needed, examples, saved)
        only_data = [need and k in self._data for k, need in enumerate(needed)]
        only_weights = [need and k not in self._data for k, need in enumerate(needed)]
        pieces = list(self._inner.backward(grads, only_weights, examples, saved))
        if any(only_data):
            of_data = self._data_gradient(grads, only_data, examples, saved)
            pieces = [of_data[k] if only_data[k] else piece for k, piece in enumerate(pieces)]
        return pieces

    def _data_gradient(
        self, grads: Any, needed: Sequence[bool], examples: int, saved: Sequence[Tensor]
    ) -> Pieces:
        if self._as_one_product(saved):
            weights = self._stacks[1].to(grads[0].dtype)
            rows = grads[0].reshape(len(weights), -1, weights.shape[1])
            return [torch.bmm(rows, weights).view(saved[0].shape), None, None]
        return self._by_slices(grads, needed, examples, saved)

    def _by_slices(
        self, grads: Any, needed: Sequence[bool], examples: int, saved: Sequence[Tensor]
    ) -> Pieces:
        rows = self.lead // examples  # of one example
        cuts = zip(
            self._parts, self._cut(saved), grads[0].split(self._sizes, self.axis), self._sizes, strict=True
        )
        pieces = [part.backward((g,), needed, size // rows, cut) for part, cut, g, size in cuts]
        return [
            _join(list(parts), self.axis, k in self._data)
            for k, parts in enumerate(zip(*pieces, strict=True))
        ]

    def _cut(self, tensors: Sequence[Tensor | None]) -> list[list[Any]]:
        """The tensors of each slice: data by rows, stacked weights by their own, the rest whole."""
        columns: list[Sequence[Any]] = []
        for k, tensor in enumerate(tensors):
            if k in self._stacks:
                columns.append(self._stacks[k].unbind(0)[: len(self._sizes)])
            elif (
                k in self._data
                and tensor is not None
                and tensor.dim() > self.axis
                and tensor.shape[self.axis] == self.lead
            ):
                columns.append(tensor.split(self._sizes, self.axis))  # type: ignore[no-untyped-call]
            else:
                columns.append([tensor] * len(self._sizes))
        return [list(cut) for cut in zip(*columns, strict=True)]

    def _as_one_product(self, tensors: Sequence[Tensor | None]) -> bool:
        stacked = set(self._stacks) == {k for k in (1, 2) if tensors[min(k, len(tensors) - 1)] is not None}
        equal = len(set(self._sizes)) == 1 and self.axis == 0
        return (
            isinstance(self._inner, Linear) and stacked and equal and len(self._sizes) == len(self._stacks[1])
        )

    def _batched_linear(self, x: Any, weight: Any, bias: Any) -> Tensor:
        weights = self._stacks[1].transpose(1, 2)
        rows = x.reshape(len(weights), -1, x.shape[-1])
        out = (
            torch.bmm(rows, weights)
            if bias is None
            else torch.baddbmm(self._stacks[2].unsqueeze(1), rows, weights)
        )
        return out.view(*x.shape[:-1], weights.shape[2])


def _refuse(operation: Operation) -> None:
    rows = operation.tensors[0]
    merged = operation.axis == 1 and rows is not None and rows.dim() == 2
    if merged or isinstance(operation, (Recurrent, BatchNorm)):
        raise UnsupportedOperation(
            f"{operation.name} cannot have different weights for different slices of the batch. Use mc_samples "
            "without slices and without vectorized; for BatchNorm, pass the module to the optimiser, so that it "
            "is deterministic."
        )


def _slice_sizes(examples: int, slices: int, lead: int) -> list[int]:
    """Nearly equal numbers of examples, as rows; never more slices than examples."""
    slices = min(slices, examples)
    rows = lead // max(examples, 1)
    return [rows * (examples // slices + (k < examples % slices)) for k in range(slices)]


def _join(parts: list[Any], axis: int, is_data: bool) -> Tensor | Contribution | None:
    if parts[0] is None:
        return None
    if isinstance(parts[0], Contribution):
        if not is_data:
            return Joined(parts)
        parts = [part.total() for part in parts]
    return torch.cat(parts, axis)


def _sum(tensors: list[Tensor]) -> Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total
