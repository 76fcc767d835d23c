"""Linear maps: F.linear, x @ W, W @ x, addmm.

x input, g gradient of the output, i over examples, t over the positions of one example:

    one position     Σᵢ rᵢ² = (g²)ᵀ(x²)             one more matrix product
    many positions   Σᵢ rᵢ² = Σᵢ (Σₜ gᵢₜ xᵢₜᵀ)²      treating positions as examples would be wrong
    bias             rᵢ = Σₜ gᵢₜ
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from credo.curvature.factors import row_factors
from credo.curvature.rule import (
    Factors,
    Operation,
    Outputs,
    PerExampleGradient,
    Pieces,
    Stacked,
    Sums,
    by_example,
    widen,
)
from credo.curvature.rules.registry import register_rule
from credo.kernels import linear as kernel


class OuterProducts(PerExampleGradient):
    """rᵢ = Σₜ gᵢₜ xᵢₜᵀ, from x (M, T, I) and g (M, T, O), or (M, I) and (M, O); shape (O, I), or as `shape` says."""

    def __init__(self, x: Tensor, g: Tensor, shape: torch.Size | None = None):
        self.examples = x.shape[0]
        self._x, self._g = x, g
        self._shape = shape or torch.Size((g.shape[-1], x.shape[-1]))

    def total(self) -> Tensor:
        x, g = (t if t.dim() == 2 else t.flatten(0, 1) for t in (self._x, self._g))
        return (g.T @ x).view(self._shape)

    def total_and_squares(self) -> tuple[Tensor, Tensor]:
        sums = kernel.row_sums if self._x.dim() == 2 else kernel.sequence_sums
        total, squares = sums(widen(self._x), widen(self._g))
        return total.view(self._shape), squares.view(self._shape)

    def per_example(self, start: int, stop: int) -> Tensor:
        x, g = widen(self._x[start:stop]), widen(self._g[start:stop])
        if x.dim() == 2:
            return (g.unsqueeze(2) * x.unsqueeze(1)).view(-1, *self._shape)
        return torch.bmm(g.transpose(1, 2), x).view(-1, *self._shape)

    def factors(self, biased: bool, sharing: str) -> Factors:
        return row_factors(widen(self._x), widen(self._g), biased, sharing)


@register_rule(F.linear)
class Linear(Operation):
    parameter_slots = frozenset({1, 2})
    layer = (1, 2)
    name = "linear"

    def __init__(self, input: Tensor, weight: Tensor, bias: Tensor | None = None):
        self.tensors = (input, weight, bias)
        if weight.dim() != 2 or (bias is not None and bias.shape != weight.shape[:1]):
            self.parameter_slots = frozenset()  # torch repeats a smaller bias; that goes row by row
        self.example_rows = input

    def forward(self, *tensors: Tensor | None) -> tuple[Outputs, tuple[Tensor, ...]]:
        return F.linear(*tensors), ()  # type: ignore[arg-type]

    def backward(
        self, grads: tuple[Tensor | None, ...], needed: Sequence[bool], examples: int, saved: Sequence[Tensor]
    ) -> Pieces:
        g = grads[0]
        assert g is not None
        x, weight = saved[0].to(g.dtype), saved[1].to(g.dtype)
        gx = g @ weight if needed[0] else None
        x, g = by_example(x, examples, self.axis), by_example(g, examples, self.axis)
        return gx, OuterProducts(x, g) if needed[1] else None, bias_gradient(g) if needed[2] else None

    def sums(
        self, grads: tuple[Tensor | None, ...], needed: Sequence[bool], examples: int, saved: Sequence[Tensor]
    ) -> Sums | None:
        """Of a layer with one position an example, both parameters by one kernel."""
        g, x, weight = grads[0], saved[0], saved[1]
        assert g is not None
        flat = self.lead == examples and not self.axis and g.dim() == 2
        both = len(self.watched_keys) == 2 and needed[1] and needed[2]
        if not flat or not both or not x.dtype is weight.dtype is g.dtype:
            return None
        gx = torch.mm(g, weight) if needed[0] else None
        total, squares, bias_total, bias_squares = kernel.layer_sums(x, g)
        return (gx, total, bias_total), (squares, bias_squares)


@register_rule(torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.mm, torch.Tensor.mm)
def matmul(input: Tensor, other: Tensor) -> Operation:
    """x @ W with the matrix or vector W on the right; other products have no rule of their own."""
    return RightProduct(input, other)


class RightProduct(Operation):
    """x @ W: the linear map by Wᵀ, so x and g change places."""

    parameter_slots = frozenset({1})
    name = "matmul"

    def __init__(self, input: Tensor, other: Tensor):
        self.tensors = (input, other)
        self.parameter_slots = frozenset({1} if other.dim() <= 2 else ())
        self.count_examples(input)

    def forward(self, *tensors: Tensor | None) -> tuple[Outputs, tuple[Tensor, ...]]:
        return torch.matmul(*tensors), ()  # type: ignore[arg-type]

    def backward(
        self, grads: tuple[Tensor | None, ...], needed: Sequence[bool], examples: int, saved: Sequence[Tensor]
    ) -> Pieces:
        g = grads[0]
        assert g is not None
        x, weight = saved[0].to(g.dtype), saved[1].to(g.dtype)
        columns = weight.view(len(weight), -1)  # a vector is one column
        g = g if weight.dim() == 2 else g.unsqueeze(-1)
        gradients = OuterProducts(by_example(g, examples), by_example(x, examples), weight.shape)
        return g @ columns.T if needed[0] else None, gradients if needed[1] else None


@register_rule(torch.addmm, torch.Tensor.addmm)
class AddMM(Operation):
    """beta·bias + alpha·x @ W, on rows (M·T, d) as GPT-2 has them."""

    parameter_slots = frozenset({0, 2})
    name = "addmm"

    def __init__(self, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1):
        self.tensors = (input, mat1, mat2)
        self.parameter_slots = frozenset({0, 2} if input.shape == mat2.shape[1:] else {2})
        self._beta, self._alpha = beta, alpha
        self.count_examples(mat1)

    def forward(self, *tensors: Tensor | None) -> tuple[Outputs, tuple[Tensor, ...]]:
        return torch.addmm(*tensors, beta=self._beta, alpha=self._alpha), ()  # type: ignore[arg-type]

    def backward(
        self, grads: tuple[Tensor | None, ...], needed: Sequence[bool], examples: int, saved: Sequence[Tensor]
    ) -> Pieces:
        g = grads[0]
        assert g is not None
        x, weight = saved[1].to(g.dtype), saved[2].to(g.dtype)
        rows = by_example(g * self._alpha, examples)
        added: Tensor | PerExampleGradient = g * self._beta
        if saved[0].dim() == 1:
            added = bias_gradient(by_example(g * self._beta, examples))
        return (
            added if needed[0] else None,
            (g @ weight.T) * self._alpha if needed[1] else None,
            OuterProducts(rows, by_example(x, examples)) if needed[2] else None,
        )


def bias_gradient(rows: Tensor) -> Stacked:
    """rᵢ = Σₜ gᵢₜ from (M, T, O) or (M, O)."""
    return Stacked(rows if rows.dim() == 2 else rows.sum(1))
