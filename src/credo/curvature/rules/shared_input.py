"""The first linear layer of vectorised samples: K weights, and one input that all of them see.

With gₖᵢ the gradient of sample k and example i, and x the same for all k, the sums over samples come first:

    Σ rₖᵢ = (Σₖ gₖ)ᵀ x        Σ rₖᵢ² = (Σₖ gₖ²)ᵀ (x²)

so that the weight costs what it costs for one sample, and the input is never repeated.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from credo.curvature.contribution import Contribution, widen
from credo.curvature.operation import Operation, Outputs, Pieces
from credo.kernels.linear import squared
from credo.kernels.scratch import lend, scratch


class SharedRows:
    """x (M, I) and g (K, M, O); the sums over samples, which weight and bias both need, once."""

    def __init__(self, x: Tensor, g: Tensor):
        self.x, self.g = widen(x), widen(g)
        self._sums: tuple[Tensor, Tensor] | None = None

    def sums(self) -> tuple[Tensor, Tensor]:
        """Σₖ gₖ and Σₖ gₖ², both (M, O)."""
        if self._sums is None:
            self._sums = self.g.sum(0), squared(self.g, "g").sum(0)
        return self._sums


class SharedProducts(Contribution):
    """rₖᵢ = gₖᵢ xᵢᵀ; example number k·M + i."""

    def __init__(self, rows: SharedRows):
        self.examples = rows.g.shape[0] * rows.g.shape[1]
        self._rows = rows

    def total(self) -> Tensor:
        return self._rows.sums()[0].T @ self._rows.x

    def total_and_squares(self) -> tuple[Tensor, Tensor]:
        of_g, x = self._rows.sums()[1], self._rows.x
        squares = lend((of_g.shape[1], x.shape[1]), x)
        return self.total(), torch.mm(of_g.T, squared(x, "x"), out=squares)

    def per_example(self, start: int, stop: int) -> Tensor:
        x, g = self._rows.x, self._rows.g
        at = torch.arange(start, stop, device=x.device) % len(x)
        return g.flatten(0, 1)[start:stop].unsqueeze(2) * x[at].unsqueeze(1)


class SharedBias(Contribution):
    """rₖᵢ = gₖᵢ."""

    def __init__(self, rows: SharedRows):
        self.examples = rows.g.shape[0] * rows.g.shape[1]
        self._rows = rows

    def total(self) -> Tensor:
        return self._rows.sums()[0].sum(0)

    def total_and_squares(self) -> tuple[Tensor, Tensor]:
        return self.total(), self._rows.sums()[1].sum(0)

    def per_example(self, start: int, stop: int) -> Tensor:
        return self._rows.g.flatten(0, 1)[start:stop]


class SharedInputLinear(Operation):
    """tensors: x (M, I) without a gradient, weight, bias; `weights` (K, O, I) and `biases` (K, O) are the samples'."""

    parameter_slots = frozenset({1, 2})
    name = "linear"

    def __init__(self, tensors: tuple[Tensor | None, ...], weights: Tensor, biases: Tensor | None):
        self.tensors = tensors
        self._weights, self._biases = weights, biases
        assert tensors[0] is not None
        self.lead = len(weights) * len(tensors[0])

    def forward(self, *tensors: Tensor | None) -> tuple[Outputs, tuple[Tensor, ...]]:
        x, columns = tensors[0], self._weights.flatten(0, 1).T
        assert x is not None
        by_row = torch.mm(x, columns, out=scratch("by row", (len(x), columns.shape[1]), columns))
        by_sample = by_row.view(len(x), len(self._weights), -1).transpose(0, 1)  # (K, M, O)
        out = by_row.new_empty(by_sample.shape)
        if self._biases is None:
            out.copy_(by_sample)
        else:
            torch.add(by_sample, self._biases.unsqueeze(1), out=out)
        return out.flatten(0, 1), ()

    def backward(
        self, grads: tuple[Tensor | None, ...], needed: Sequence[bool], examples: int, saved: Sequence[Tensor]
    ) -> Pieces:
        g = grads[0]
        assert g is not None
        rows = SharedRows(saved[0].to(g.dtype), g.reshape(len(self._weights), -1, g.shape[-1]))
        return None, SharedProducts(rows) if needed[1] else None, SharedBias(rows) if needed[2] else None
