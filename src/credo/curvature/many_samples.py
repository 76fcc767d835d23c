"""Parameters with many values at once, so that many weight samples cost little more than one.

Two arrangements. *Slices*: the batch is cut into as many slices as there are samples, and each slice
sees its own. *Vectorised*: every sample sees the whole batch, under `torch.vmap`; inside an operation
the samples are folded into the examples, (K, M, …) → (K·M, …), and are slices again.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from credo.curvature.intercept import Watch
from credo.curvature.rule import Operation, Outputs, PerExampleGradient, Pieces, lead_before_merge
from credo.curvature.rules import rule_for
from credo.curvature.rules.convolution import Convolution, TransposedConvolution
from credo.curvature.rules.elementwise import Elementwise
from credo.curvature.rules.embedding import Embedding
from credo.curvature.rules.linear import AddMM, Linear, RightProduct
from credo.curvature.rules.normalisation import BatchNorm
from credo.curvature.stacked_layers import StackedConvolution, StackedLinear, as_one_call
from credo.curvature.tracking import PICKS, ParameterSource, tensors_in
from credo.curvature.vmap import Level, Placed, is_loss_of_rows, refuse_backward
from credo.errors import EmptyBatch, UnsupportedOperation
from credo.kernels.scratch import expect_large_blocks

# ────────────────────────────────────────
# One operation with many weights: every slice of the examples has a sample of its own.
#
# The weights of the slices are stacked, (S, *shape). Only the forward pass and the gradient of the
# input see them: for a linear map or a convolution rᵢ depends on x and g alone, so one kernel call
# still serves the whole batch. A linear map of equal slices is one batched matrix product.

# For these rᵢ is a function of x and g, whatever the weight.
_FREE_OF_WEIGHTS = (Linear, Convolution, TransposedConvolution, RightProduct, AddMM, Embedding)


class Joined(PerExampleGradient):
    """The gradients of the slices, one after the other."""

    def __init__(self, parts: list[PerExampleGradient]):
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
        gradients = zip(*(self._gradients(g, k) for k, g in enumerate(grads)), strict=True)
        cuts = zip(self._parts, self._cut(saved), gradients, self._sizes, strict=True)
        pieces = [part.backward(g, needed, size // rows, cut) for part, cut, g, size in cuts]
        joined = [
            _join(list(parts), self._inner.example_axis(k), k in self._data)
            for k, parts in enumerate(zip(*pieces, strict=True))
        ]
        if self._merged and isinstance(joined[0], Tensor):
            joined[0] = joined[0].flatten(0, 1)
        return joined

    def _gradients(self, grad: Tensor | None, number: int) -> Sequence[Tensor | None]:
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


def _join(parts: list[Any], axis: int, is_data: bool) -> Tensor | PerExampleGradient | None:
    if parts[0] is None:
        return None
    if isinstance(parts[0], PerExampleGradient):
        if not is_data:
            return Joined(parts)
        parts = [part.total() for part in parts]
    return torch.cat(parts, axis)


def _sum(tensors: list[Tensor]) -> Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total


# ────────────────────────────────────────

RECURRENT: dict[Any, Any] = {
    function: rule_for(function)
    for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu")
    for function in (getattr(torch, kind), getattr(torch, f"{kind}_cell"))
}
_AFTER_INPUT = ("running_mean", "running_var", "weight", "bias", "training")
BATCH_NORMS: dict[Any, tuple[str, ...]] = {
    F.batch_norm: ("input", *_AFTER_INPUT),
    torch.batch_norm: ("input", "weight", "bias", "running_mean", "running_var", "training"),
    F.instance_norm: ("input", "running_mean", "running_var", "weight", "bias", "training"),
}


class StackedWeights:
    """`weights`: id of a parameter → (S, *shape). Parameters that are not in it have one value."""

    def __init__(self, weights: dict[int, Tensor], samples: int):
        self._weights, self._samples, self._level = weights, samples, Level(samples)
        self._derived: list[Tensor] = []
        self.needs_rules = True
        expect_large_blocks()

    def vectorised(self, closure: Callable[[], Tensor]) -> Tensor:
        """The closure's losses for all samples, (K, M) or (K,), by one run of it."""
        losses: Tensor = self._level.run(closure)
        return losses

    def run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """A call without parameters, of all samples at once."""
        if not self._level.active:
            return func(*args, **kwargs)
        if is_loss_of_rows(func, args, kwargs):
            return self._level.cross_entropy(args, kwargs)
        if func in RECURRENT:  # with frozen weights; vmap has no rule for it
            operation = RECURRENT[func](*args, **kwargs)
            return self.apply(operation, (None,) * len(operation.tensors), _plainly)
        if func in BATCH_NORMS and _updates_statistics(func, args, kwargs):
            _refuse_vectorised("batch_norm")
        return func(*args, **kwargs)

    def apply(self, operation: Operation, sources: tuple[ParameterSource | None, ...], watch: Watch) -> Any:
        """Runs a watched operation with each example's own weights."""
        if operation.lead == 0:
            raise EmptyBatch("the batch is empty: there is no example to give a sample to. Skip it.")
        if not self._level.active:
            return watch(self._slice(operation, sources), sources)
        if isinstance(operation, BatchNorm):
            _refuse_vectorised(operation.name)

        def physical(tensors: tuple[Any, ...], places: tuple[int | None, ...]) -> Placed:
            x, place = tensors[0], places[0]
            merged = self._merged_from(operation, tensors, places)
            common = place is None and x.dim() == 2 and not x.requires_grad  # the first layer
            one_product = merged is None and self._is_one_product(operation, tensors)
            if one_product and (common or (place == 0 and x.dim() == 3)):
                return watch(self._product(tensors, common), sources), 0
            columns = zip(tensors, places, sources, strict=True)
            folded = operation.on(
                [self._fold(operation, slot, *column) for slot, column in enumerate(columns)]
            )
            folded.lead = operation.lead * self._samples
            folded.merged_from = merged and merged * self._samples
            return self._unfold(operation, watch(self._slice(folded, sources), sources))

        return self._level.physically(physical, operation.tensors)

    def run_without_rule(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """A comparison or the like as it is. Of anything else nothing tells how its slices make up the whole."""
        with torch.no_grad():
            result = func(*args, **kwargs)
        if not any(out.is_floating_point() or out.is_complex() for out in tensors_in((result,))):
            return result
        raise UnsupportedOperation(
            f"{getattr(func, '__name__', func)} has no rule for this use of a parameter, and without one it cannot "
            "have different weights for different slices or samples of one batch. Use mc_samples without slices and "
            "without vectorized, or write a rule: credo.register_rule."
        )

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

    def _merged_from(
        self, operation: Operation, tensors: tuple[Any, ...], places: tuple[int | None, ...]
    ) -> int | None:
        """How many examples there were before a view merged them with positions; vmap hides the view."""
        if operation.merged_from is not None or operation.axis:
            return operation.merged_from
        for tensor, place in zip(tensors, places, strict=True):
            if place == 0 and tensor.shape[1:2] == (operation.lead,):
                return lead_before_merge(tensor, skip=1)
        return None

    def _fold(
        self, operation: Operation, slot: int, tensor: Any, dim: int | None, source: ParameterSource | None
    ) -> Any:
        """(K, M, …) → (K·M, …) for data; what all samples share is repeated."""
        axis = operation.example_axis(slot)
        if tensor is None or source is not None:
            return tensor
        if dim is None:
            tensor = tensor.unsqueeze(0).expand(self._samples, *tensor.shape)
        else:
            tensor = tensor.movedim(dim, 0)
        if _is_merged(operation, tensor[0]):  # (K, T·M, d) → (T, K·M, d)
            tensor = tensor.unflatten(1, (-1, operation.lead))
        if dim is None and (tensor.dim() <= axis + 1 or tensor.shape[axis + 1] != operation.lead):
            return tensor[0]
        return tensor.movedim(0, axis).flatten(axis, axis + 1)

    def _unfold(self, operation: Operation, out: Any) -> Placed:
        """The results with their samples, and where these are."""
        if isinstance(out, tuple):
            parts = [self._unfold_one(part, operation.result_axis(k)) for k, part in enumerate(out)]
            return tuple(part for part, _ in parts), tuple(axis for _, axis in parts)
        x = operation.tensors[0]
        unfolded, axis = self._unfold_one(out, operation.result_axis(0))
        if x is not None and _is_merged(operation, x):  # (T, K, M, d) → (K, T·M, d)
            return unfolded.movedim(axis, 0).flatten(1, 2), 0
        return unfolded, axis

    def _unfold_one(self, out: Tensor, axis: int) -> tuple[Tensor, int]:
        sizes = self._samples, out.shape[axis] // self._samples
        return out.unflatten(axis, sizes), axis  # type: ignore[no-untyped-call]

    def refuse_backward(self) -> None:
        if self._level.active:
            refuse_backward()

    def _slice(self, operation: Operation, sources: tuple[ParameterSource | None, ...]) -> Operation:
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

    def derive(self, function: Any, make: Callable[[Callable[[Tensor], Tensor]], Any], made: Any) -> None:
        """Notes what a function of parameters alone has `made`, for every sample; `make` makes it of other values.

        Only of functions that pick elements: the gradient of each sample is pulled back through the graph of one.
        """
        if function not in PICKS:
            name = getattr(function, "__name__", str(function))
            raise UnsupportedOperation(
                f"{name} computes with parameters alone, before they meet the examples (a parametrisation, a product), "
                "which cannot have different weights for different slices or samples of one batch. Use mc_samples "
                "without slices and without vectorized."
            )
        with torch.no_grad():
            values = [tensors_in((make(partial(self._value, k)),)) for k in range(self._samples)]
            for out, *own in zip(tensors_in((made,)), *values, strict=True):
                self._weights[id(out)] = torch.stack(own)
                self._derived.append(out)  # whose id must not be taken by another

    def _value(self, sample: int, tensor: Tensor) -> Tensor:
        stack = self._weights.get(id(tensor))
        return tensor.detach() if stack is None else stack[sample]


def _is_merged(operation: Operation, rows: Tensor) -> bool:
    """Whether rows inside attention are (T·M, d)."""
    return operation.axis == 1 and rows.dim() == 2


def _plainly(operation: Operation, sources: tuple[ParameterSource | None, ...]) -> Any:
    """Of an operation without parameters: autograd's own graph."""
    return operation.forward(*operation.release())[0]


def _refuse_vectorised(name: str) -> None:
    raise UnsupportedOperation(
        f"{name} has no vectorised form that equals one sample after the other. Use vectorized=False."
    )


def _updates_statistics(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a norm without parameters moves running statistics, which it would do once for each sample."""
    given = {**dict(zip(BATCH_NORMS[func], args, strict=False)), **kwargs}
    return bool(given.get("training", False)) and given.get("running_mean") is not None
