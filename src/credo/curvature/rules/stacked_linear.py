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

    Rows of x (K, M, I), or (N, I) sample after sample, have a weight each, and the result is shaped like x; samples
    differ by one row at most, the larger ones first. Of a `common` x (M, I), which needs no gradient, the result is
    (K, M, O).
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
        if self._common:
            return _product(x.expand(len(columns), *x.shape), columns, self._biases), ()
        out = _by_sample(x.flatten(0, -2), columns, self._biases)
        return out.view(*x.shape[:-1], out.shape[-1]), ()

    def backward(
        self, grads: tuple[Tensor | None, ...], needed: Sequence[bool], examples: int, saved: Sequence[Tensor]
    ) -> Pieces:
        g, x = grads[0], saved[0]
        assert g is not None
        flat = g.flatten(0, -2)
        gx = _by_sample(flat, self._weights.to(g.dtype)).view(x.shape) if needed[0] else None
        x = x.to(g.dtype)
        weight: LayerOfRows
        if self._common:
            weight = SharedProducts(x, g, examples)
        else:
            weight = WeightOfRows(x.flatten(0, -2), flat, examples)
        return gx, weight if needed[1] else None, BiasOfRows(weight) if needed[2] else None


def _by_sample(rows: Tensor, matrices: Tensor, biases: Tensor | None = None) -> Tensor:
    """(N, I) by (K, I, O), sample after sample: one batched product, or two where samples differ by a row."""
    each, larger = divmod(len(rows), len(matrices))
    if not larger:
        return _product(rows.reshape(len(matrices), each, -1), matrices, biases).flatten(0, 1)
    parts = rows.tensor_split([larger * (each + 1)]), matrices.tensor_split([larger])
    added = (None, None) if biases is None else biases.tensor_split([larger])
    some = [_by_sample(*part) for part in zip(*parts, added, strict=True) if len(part[0])]
    return some[0] if len(some) == 1 else torch.cat(some)


def _product(rows: Tensor, matrices: Tensor, biases: Tensor | None) -> Tensor:
    return torch.bmm(rows, matrices) if biases is None else torch.baddbmm(biases.unsqueeze(1), rows, matrices)
