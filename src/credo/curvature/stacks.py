"""Parameters with many values at once, so that many weight samples cost little more than one.

Two arrangements. *Slices*: the batch is cut into as many slices as there are samples, and each slice
sees its own. *Vectorised*: every sample sees the whole batch, under `torch.vmap`; inside an operation
the samples are folded into the examples, (K, M, …) → (K·M, …), and are slices again.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from credo.curvature.arrangement import Watch
from credo.curvature.operation import Operation, lead_before_merge
from credo.curvature.provenance import PICKS, Source, tensors_in
from credo.curvature.rules import Sliced, rule_for
from credo.curvature.rules.convolution import Convolution
from credo.curvature.rules.linear import Linear
from credo.curvature.rules.normalisation import BatchNorm
from credo.curvature.rules.stacked_convolution import StackedConvolution, as_one_call
from credo.curvature.rules.stacked_linear import StackedLinear
from credo.curvature.vectorised import Level, Placed, is_loss_of_rows, refuse_backward
from credo.errors import EmptyBatch, UnsupportedOperation
from credo.kernels.scratch import expect_large_blocks

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


class Stacks:
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

    def apply(self, operation: Operation, sources: tuple[Source | None, ...], watch: Watch) -> Any:
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
            twin = operation.on([self._fold(operation, slot, *column) for slot, column in enumerate(columns)])
            twin.lead, twin.merged_from = operation.lead * self._samples, merged and merged * self._samples
            return self._unfold(operation, watch(self._slice(twin, sources), sources))

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
        self, operation: Operation, slot: int, tensor: Any, dim: int | None, source: Source | None
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


def _plainly(operation: Operation, sources: tuple[Source | None, ...]) -> Any:
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
