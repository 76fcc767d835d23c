"""A linear layer with K weights as one batched product, on rows of each sample or on rows that all of them see.

With gₖᵢ the gradient of sample k and example i, and x the same for all k, as in the first layer of vectorised samples,
the sums over samples come first:

    Σ rₖᵢ = (Σₖ gₖ)ᵀ x        Σ rₖᵢ² = (Σₖ gₖ²)ᵀ (x²)

so that the weight costs what it costs for one sample, and the input is never repeated.
"""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from credo.curvature.contribution import widen
from credo.curvature.operation import Operation, Outputs, Pieces
from credo.curvature.rules.linear import BiasOfRows, LayerOfRows, WeightOfRows


@final
class SharedProducts(LayerOfRows):
    """rₖᵢ = gₖᵢ xᵢᵀ, from x (M, I) and g (K, M, O); example number k·M + i."""

    def total(self) -> Tensor:
        return self.g.sum(0).T @ self.x

    def per_example(self, start: int, stop: int) -> Tensor:
        x, g = widen(self.x), widen(self.g)
        at = torch.arange(start, stop, device=x.device) % len(x)
        return g.flatten(0, 1)[start:stop].unsqueeze(2) * x[at].unsqueeze(1)


class StackedLinear(Operation):
    """tensors: x, weight, bias; `weights` (K, O, I), `biases` (K, O) or None.

    Rows of x (K, M, I), or (K·M, I) sample after sample, have a weight each, and the result is shaped like x. Of a
    `common` x (M, I), which needs no gradient, the result is (K, M, O).
    """

    parameter_slots = frozenset({1, 2})
    name = "linear"

    def __init__(
        self, tensors: tuple[Tensor | None, ...], weights: Tensor, biases: Tensor | None, common: bool = False
    ):
        self.tensors = tensors
        self._weights, self._biases, self._common = weights, biases, common
        assert tensors[0] is not None
        self.lead = tensors[0].shape[:-1].numel() * (len(weights) if common else 1)

    def forward(self, *tensors: Tensor | None) -> tuple[Outputs, tuple[Tensor, ...]]:
        x, columns = tensors[0], self._weights.transpose(1, 2)
        assert x is not None
        samples, inputs, outputs = columns.shape
        rows = x.expand(samples, *x.shape) if self._common else x.reshape(samples, -1, inputs)
        if self._biases is None:
            out = torch.bmm(rows, columns)
        else:
            out = torch.baddbmm(self._biases.unsqueeze(1), rows, columns)
        return out if x.dim() == 3 or self._common else out.view(-1, outputs), ()

    def backward(
        self, grads: tuple[Tensor | None, ...], needed: Sequence[bool], examples: int, saved: Sequence[Tensor]
    ) -> Pieces:
        assert grads[0] is not None
        samples, outputs, _ = self._weights.shape
        g, x = grads[0].reshape(samples, -1, outputs), saved[0]
        gx = torch.bmm(g, self._weights.to(g.dtype)).view(x.shape) if needed[0] else None
        x = x.to(g.dtype)
        weight: LayerOfRows
        if self._common:
            weight = SharedProducts(x, g, examples)
        else:
            weight = WeightOfRows(x.flatten(0, -2), g.flatten(0, 1), examples)
        return gx, weight if needed[1] else None, BiasOfRows(weight) if needed[2] else None
