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
from credo.curvature.rules.elementwise import Elementwise
from credo.curvature.rules.embedding import Embedding
from credo.curvature.rules.linear import AddMM, Linear, RightProduct
from credo.curvature.rules.normalisation import BatchNorm
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
    """`operation` cut into slices along its examples; `stacks` has the weights of the slices, slot by slot.

    Inside attention rows may be merged, (T·M, d), where the examples cannot be cut: they are seen as (T, M, d) here.
    """

    def __init__(self, operation: Operation, stacks: dict[int, Tensor], data: frozenset[int], slices: int):
        _refuse(operation, stacks, data)
        rows = operation.tensors[0]
        self._merged = operation.axis == 1 and rows is not None and rows.dim() == 2
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
        if any(extras for _, extras in outputs):
            raise UnsupportedOperation(f"{self.name} cannot have different weights for different slices.")
        self._parts = parts
        if isinstance(outputs[0][0], Tensor):
            joined = torch.cat([out for out, _ in outputs], self._inner.result_axis(0))  # type: ignore[misc]
            return joined.flatten(0, 1) if self._merged else joined, ()
        results = zip(*(out for out, _ in outputs), strict=True)
        return tuple(torch.cat(some, self._inner.result_axis(k)) for k, some in enumerate(results)), ()

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
        shares = zip(*(self._shares(g, k) for k, g in enumerate(grads)), strict=True)
        cuts = zip(self._parts, self._cut(saved), shares, self._sizes, strict=True)
        pieces = [part.backward(g, needed, size // rows, cut) for part, cut, g, size in cuts]
        joined = [
            _join(list(parts), self._inner.example_axis(k), k in self._data)
            for k, parts in enumerate(zip(*pieces, strict=True))
        ]
        if self._merged and isinstance(joined[0], Tensor):
            joined[0] = joined[0].flatten(0, 1)
        return joined

    def _shares(self, grad: Tensor | None, number: int) -> Sequence[Tensor | None]:
        """The gradient of one result, slice by slice."""
        if grad is None:
            return [None] * len(self._sizes)
        return self._split(self._unmerged(grad), self._inner.result_axis(number))

    def _split(self, tensor: Tensor, axis: int) -> Sequence[Tensor]:
        pieces: Sequence[Tensor] = tensor.split(self._sizes, axis)  # type: ignore[no-untyped-call]
        return pieces

    def _unmerged(self, rows: Tensor) -> Tensor:
        return rows.unflatten(0, (-1, self.lead)) if self._merged else rows  # type: ignore[no-untyped-call]

    def _cut(self, tensors: Sequence[Tensor | None]) -> list[list[Any]]:
        """The tensors of each slice: data by rows, stacked weights by their own, the rest whole."""
        columns: list[Sequence[Any]] = []
        for k, tensor in enumerate(tensors):
            axis = self._inner.example_axis(k)
            if k in self._stacks:
                columns.append(self._stacks[k].unbind(0)[: len(self._sizes)])
                continue
            if k in self._data and tensor is not None:
                tensor = self._unmerged(tensor)
                if tensor.dim() > axis and tensor.shape[axis] == self.lead:
                    columns.append(self._split(tensor, axis))
                    continue
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


def _refuse(operation: Operation, stacks: dict[int, Tensor], data: frozenset[int]) -> None:
    if isinstance(operation, BatchNorm):
        raise UnsupportedOperation(
            f"{operation.name} cannot have different weights for different slices of the batch. Use mc_samples "
            "without slices and without vectorized; or pass the module to the optimiser, so that its BatchNorm layers "
            "are deterministic."
        )
    if operation.lead < 1:
        raise UnsupportedOperation(
            f"{operation.name} on a tensor without a dimension that counts examples cannot have different weights for "
            "different slices of the batch. Use mc_samples without slices and without vectorized, or give the batch a "
            "leading dimension."
        )
    dims = max((t.dim() for k in data if (t := operation.tensors[k]) is not None), default=0)
    for weights in stacks.values():  # (S, *shape)
        if (
            isinstance(operation, Elementwise)
            and weights.dim() > dims
            and weights.shape[1] == operation.lead > 1
        ):
            raise UnsupportedOperation(
                f"{operation.name} has a parameter of shape {tuple(weights.shape[1:])} with a row for each of the "
                f"{operation.lead} examples, which slices of the batch cannot share. Use mc_samples without slices and "
                "without vectorized."
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
