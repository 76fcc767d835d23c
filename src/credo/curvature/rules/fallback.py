"""The answer for every operation without a rule: exact, and slower.

Example i's gradient with respect to a parameter is what row i of the output sends back. Where the output
rows can be computed one by one from the rows of the inputs, that is done (vectorised if torch can),
and checked against the output; otherwise each row's gradient is sent back through the whole operation.
"""

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor

from credo.curvature.rule import Operation, Outputs, PerExampleGradient, Pieces, chunked_sums, widen
from credo.curvature.torch_private import tree_flatten, tree_unflatten

Call = Callable[..., Tensor]


class Generic(Operation):
    """Any function of tensors whose outputs have the examples in front."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        shared: Sequence[bool],
    ):
        leaves, self._spec = tree_flatten((tuple(args), kwargs))
        self._leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._places = [k for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self._call_function = function
        self.tensors = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
        self._shared = tuple(shared)  # which tensors stand for parameters
        self.parameter_slots = frozenset(k for k, s in enumerate(shared) if s)
        self.name = getattr(function, "__name__", str(function))

    @property
    def equation(self) -> str | None:
        """Of an einsum."""
        first = self._leaves[0]
        return first if isinstance(first, str) and self.name == "einsum" else None

    def call(self, *tensors: Tensor) -> Any:
        leaves = list(self._leaves)
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = tree_unflatten(leaves, self._spec)
        return self._call_function(*args, **kwargs)

    def run(self) -> tuple[Any, bool]:
        """The result, in a private graph (so that randomness happens once), and whether it has a gradient."""
        with torch.enable_grad():
            self._own = [
                _leaf(t, shared)
                for t, shared in zip(self.tensors, self._shared, strict=True)
                if t is not None
            ]
            self._result = self.call(*self._own)
        outputs = (self._result,) if isinstance(self._result, Tensor) else self._result
        self._outputs = tuple(outputs) if isinstance(outputs, (tuple, list)) else ()
        return self._result, any(isinstance(out, Tensor) and out.requires_grad for out in self._outputs)

    def on(self, tensors: Sequence[Tensor | None]) -> "Operation":
        other = copy(self)
        other.tensors = tuple(tensors)
        other.run()
        return other

    def forward(self, *tensors: Tensor | None) -> tuple[Outputs, tuple[Tensor, ...]]:
        first = self._outputs[0]
        self.lead = first.shape[self.axis] if first.dim() > self.axis else -1
        handed = tuple(out.detach() for out in self._outputs)
        return (handed[0] if isinstance(self._result, Tensor) else handed), ()

    def backward(
        self, grads: tuple[Tensor | None, ...], needed: Sequence[bool], examples: int, saved: Sequence[Tensor]
    ) -> Pieces:
        pairs = [
            (o, g) for o, g in zip(self._outputs, grads, strict=True) if g is not None and o.requires_grad
        ]
        outs, gs = [o for o, _ in pairs], [g for _, g in pairs]
        wanted = [k for k, need in enumerate(needed) if need]
        with torch.enable_grad():
            sums = torch.autograd.grad(
                outs, [self._own[k] for k in wanted], gs, retain_graph=True, allow_unused=True
            )
        pieces: list[Tensor | PerExampleGradient | None] = [None] * len(self._shared)
        for k, total in zip(wanted, sums, strict=True):
            if total is not None:
                pieces[k] = RowByRow(self, k, total, outs, gs, examples) if self._shared[k] else total
        return pieces

    def arguments_of(self, start: int, stop: int) -> list[Tensor]:
        """The arguments for some examples: data by their rows, parameters whole."""
        own = [tensor.detach() for tensor in self._own]
        cut = [not shared and self._has_rows(t) for t, shared in zip(own, self._shared, strict=True)]
        return [self.rows(t, start, stop) if c else t for t, c in zip(own, cut, strict=True)]

    def rows(self, tensor: Tensor, start: int, stop: int) -> Tensor:
        return tensor.narrow(self.axis, start, stop - start)

    def _has_rows(self, tensor: Tensor) -> bool:
        return tensor.dim() > self.axis and tensor.shape[self.axis] == self.lead


class RowByRow(PerExampleGradient):
    """What each output row sends back to one parameter of a generic operation."""

    def __init__(
        self,
        operation: Generic,
        slot: int,
        total: Tensor,
        outs: list[Tensor],
        gs: list[Tensor],
        examples: int,
    ):
        self.examples = examples
        self._operation, self._slot, self._total = operation, slot, total
        self._outs, self._gs = outs, gs
        self._rows = operation.lead // max(examples, 1)  # of one example, where a view merged them

    def total(self) -> Tensor:
        return self._total

    def total_and_squares(self) -> tuple[Tensor, Tensor]:
        like = widen(self._total)
        return self._total, chunked_sums(self.per_example, self.examples, like)[1]

    def per_example(self, start: int, stop: int) -> Tensor:
        gradients = [self._sliced(i) for i in range(start, stop)]
        return torch.stack(
            [self._masked(i) if s is None else s for i, s in zip(range(start, stop), gradients, strict=True)]
        )

    def _sliced(self, example: int) -> Tensor | None:
        """By the example's own rows; None where the operation does not work row by row."""
        start, stop = example * self._rows, (example + 1) * self._rows
        arguments = self._operation.arguments_of(start, stop)
        try:
            with torch.enable_grad():
                arguments[self._slot].requires_grad_()
                outs = self._operation.call(*arguments)
                outs = (outs,) if isinstance(outs, Tensor) else tuple(outs)
                outs = [out for out in outs if out.requires_grad]
                if not self._same_rows(outs, start, stop):
                    return None
                gs = [self._operation.rows(g, start, stop) for g in self._gs]
                (gradient,) = torch.autograd.grad(outs, arguments[self._slot], gs)
        except (RuntimeError, IndexError, ValueError):
            return None
        return gradient

    def _same_rows(self, outs: Sequence[Tensor], start: int, stop: int) -> bool:
        whole = [self._operation.rows(out.detach(), start, stop) for out in self._outs]
        return len(outs) == len(whole) and all(
            a.shape == b.shape and torch.allclose(a.detach(), b, rtol=1e-4, atol=1e-6, equal_nan=True)
            for a, b in zip(outs, whole, strict=True)
        )

    def _masked(self, example: int) -> Tensor:
        """By sending back the gradient of the example's rows alone."""
        start, stop = example * self._rows, (example + 1) * self._rows
        masked = [torch.zeros_like(g) for g in self._gs]
        for zero, g in zip(masked, self._gs, strict=True):
            self._operation.rows(zero, start, stop).copy_(self._operation.rows(g, start, stop))
        (gradient,) = torch.autograd.grad(
            self._outs, self._operation._own[self._slot], masked, retain_graph=True
        )
        return gradient


def _leaf(tensor: Tensor, shared: bool) -> Tensor:
    leaf, differentiable = tensor.detach(), tensor.is_floating_point() or tensor.is_complex()
    return leaf.requires_grad_() if differentiable and (shared or tensor.requires_grad) else leaf
