"""Sums, differences, products and quotients with a bare parameter, and PReLU.

A class token, a layer scale, a positional table or a hand-written bias meets the examples in such an
operation. The gradient with respect to the broadcast operand is elementwise; example i's gradient is
its row of it, summed over what was broadcast.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from credo.curvature.rule import Operation, Outputs, PerExampleGradient, Pieces, chunked_sums, widen
from credo.curvature.rules.registry import register_rule
from credo.curvature.tracking import Provenance


class Broadcast(PerExampleGradient):
    """rᵢ = local[i] summed to `shape`, the shape of an operand that was broadcast to local's (M, …)."""

    def __init__(self, local: Tensor, shape: torch.Size):
        self.examples = len(local)
        self._local, self._shape = local, shape
        self._by_row = len(shape) == local.dim() and shape[0] == len(local) > 1

    def total(self) -> Tensor:
        return self._local.sum_to_size(self._shape)

    def total_and_squares(self) -> tuple[Tensor, Tensor]:
        if self._by_row:  # the operand has a row for each example: no two examples meet in an element
            return self._local.sum_to_size(self._shape), widen(self._local.sum_to_size(self._shape)).square()
        like = torch.empty(self._shape, dtype=widen(self._local[:0]).dtype, device=self._local.device)
        return chunked_sums(self.per_example, self.examples, like)

    def per_example(self, start: int, stop: int) -> Tensor:
        rows = widen(self._local[start:stop])
        if self._by_row:
            reduced = rows.sum_to_size((stop - start, *self._shape[1:]))
            placed = rows.new_zeros((stop - start, *self._shape))
            index = torch.arange(stop - start, device=rows.device)
            placed[index, index + start] = reduced
            return placed
        inner = self._shape[1:] if len(self._shape) == rows.dim() else self._shape
        kept = (1,) * (rows.dim() - 1 - len(inner))
        return rows.sum_to_size((stop - start, *kept, *inner)).reshape(stop - start, *self._shape)


class Elementwise(Operation):
    """out = f(a, b) elementwise with broadcasting; `slopes` gives ∂f/∂a and ∂f/∂b, or None for 1."""

    parameter_slots = frozenset({0, 1})

    def __init__(
        self, name: str, function: Callable[..., Tensor], slopes: Callable[..., Tensor], a: Any, b: Any
    ):
        self.name, self._function, self._slopes = name, function, slopes
        self._values = (a, b)
        self.tensors = tuple(v if isinstance(v, Tensor) else None for v in (a, b))
        if any(t is not None and t.is_complex() for t in self.tensors):
            self.parameter_slots = (
                frozenset()
            )  # torch's own gradients, row by row: those by `slopes` are real
        self._shape: torch.Size = torch.broadcast_shapes(  # type: ignore[no-untyped-call]
            *(t.shape for t in self.tensors if t is not None)
        )
        self.lead = self._shape[0] if self._shape else -1

    def has_no_examples(self, provenance: Provenance) -> bool:
        """A parameter as large as the result, rows and all, is being masked: none has a row for each example."""
        whole = self._shape
        for own, other in (self.tensors, self.tensors[::-1]):
            source = provenance.source(own)
            if source and source.selects and not (other is not None and other.requires_grad):
                return source.tensor.shape == whole and whole.numel() > 0 and len(whole) > 0 and whole[0] > 1
        return False

    def forward(self, *tensors: Tensor | None) -> tuple[Outputs, tuple[Tensor, ...]]:
        return self._function(*self._operands(tensors)), ()

    def backward(
        self, grads: tuple[Tensor | None, ...], needed: Sequence[bool], examples: int, saved: Sequence[Tensor]
    ) -> Pieces:
        g = grads[0]
        assert g is not None
        a, b = self._operands(saved)
        return tuple(
            self._piece(self._slopes(slot, g, a, b), saved[slot], examples) if needed[slot] else None
            for slot in (0, 1)
        )

    def _piece(self, local: Tensor, operand: Tensor, examples: int) -> PerExampleGradient:
        if len(local) != examples:
            local = local.reshape(examples, -1, *local.shape[1:])
        return Broadcast(local, operand.shape)

    def _operands(self, tensors: Sequence[Tensor | None]) -> tuple[Any, Any]:
        a, b = (
            value if tensor is None else tensor for value, tensor in zip(self._values, tensors, strict=True)
        )
        return a, b


@register_rule(torch.add, torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__)
def add(input: Any, other: Any, *, alpha: float = 1) -> Operation:
    def slopes(slot: int, g: Tensor, a: Any, b: Any) -> Tensor:
        return g if slot == 0 else g * alpha

    return Elementwise("add", lambda a, b: torch.add(a, b, alpha=alpha), slopes, input, other)


@register_rule(torch.sub, torch.Tensor.sub, torch.Tensor.__sub__)
def sub(input: Any, other: Any, *, alpha: float = 1) -> Operation:
    def slopes(slot: int, g: Tensor, a: Any, b: Any) -> Tensor:
        return g if slot == 0 else -alpha * g

    return Elementwise("sub", lambda a, b: torch.sub(a, b, alpha=alpha), slopes, input, other)


@register_rule(torch.mul, torch.Tensor.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__)
def mul(input: Any, other: Any) -> Operation:
    def slopes(slot: int, g: Tensor, a: Tensor | float, b: Tensor | float) -> Tensor:
        return g * (b if slot == 0 else a)

    return Elementwise("mul", torch.mul, slopes, input, other)


@register_rule(torch.div, torch.Tensor.div, torch.Tensor.__truediv__, torch.true_divide)
def div(input: Any, other: Any) -> Operation:
    def slopes(slot: int, g: Tensor, a: Tensor | float, b: Tensor | float) -> Tensor:
        return g / b if slot == 0 else -g * a / (b * b)

    return Elementwise("div", torch.div, slopes, input, other)


@register_rule(torch.prelu)
class PReLU(Operation):
    """max(x, 0) + w·min(x, 0), w one number or one a channel: rᵢ = Σₚ min(x, 0)·g."""

    parameter_slots = frozenset({1})
    name = "prelu"

    def __init__(self, input: Tensor, weight: Tensor):
        self.tensors = (input, weight)
        self.count_examples(input)

    def forward(self, *tensors: Tensor | None) -> tuple[Outputs, tuple[Tensor, ...]]:
        return torch.prelu(*tensors), ()  # type: ignore[arg-type]

    def backward(
        self, grads: tuple[Tensor | None, ...], needed: Sequence[bool], examples: int, saved: Sequence[Tensor]
    ) -> Pieces:
        x, weight = saved
        g = grads[0]
        assert g is not None
        slope = weight if weight.numel() == 1 else weight.view(-1, *[1] * (x.dim() - 2))
        local = (g * x.clamp(max=0)).reshape(examples, -1, *x.shape[1:])
        shape = torch.Size((weight.numel(), *[1] * (x.dim() - 2)))
        return torch.where(x > 0, g, g * slope), Reshaped(Broadcast(local, shape), weight.shape)


class Reshaped(PerExampleGradient):
    """The same numbers in another shape."""

    def __init__(self, inner: PerExampleGradient, shape: torch.Size):
        self.examples, self._inner, self._shape = inner.examples, inner, shape

    def total(self) -> Tensor:
        return self._inner.total().view(self._shape)

    def total_and_squares(self) -> tuple[Tensor, Tensor]:
        total, squares = self._inner.total_and_squares()
        return total.view(self._shape), squares.view(self._shape)

    def per_example(self, start: int, stop: int) -> Tensor:
        return self._inner.per_example(start, stop).view(stop - start, *self._shape)
