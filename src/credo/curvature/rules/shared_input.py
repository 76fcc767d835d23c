"""The first linear layer of vectorised samples: K weights, and one input that all of them see.

With gₖᵢ the gradient of sample k and example i, and x the same for all k, the sums over samples come first:

    Σ rₖᵢ = (Σₖ gₖ)ᵀ x        Σ rₖᵢ² = (Σₖ gₖ²)ᵀ (x²)

so that the weight costs what it costs for one sample, and the input is never repeated.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from credo.curvature.contribution import Contribution, Stacked, widen
from credo.curvature.operation import Operation, Outputs, Pieces


class SharedProducts(Contribution):
    """rₖᵢ = gₖᵢ xᵢᵀ from x (M, I) and g (K, M, O); example number k·M + i."""

    def __init__(self, x: Tensor, g: Tensor):
        self.examples = g.shape[0] * g.shape[1]
        self._x, self._g = widen(x), widen(g)

    def total(self) -> Tensor:
        return self._g.sum(0).T @ self._x

    def total_and_squares(self) -> tuple[Tensor, Tensor]:
        return self.total(), self._g.square().sum(0).T @ self._x.square()

    def per_example(self, start: int, stop: int) -> Tensor:
        rows = torch.arange(start, stop, device=self._x.device) % len(self._x)
        return self._g.flatten(0, 1)[start:stop].unsqueeze(2) * self._x[rows].unsqueeze(1)


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
        x, samples = tensors[0], len(self._weights)
        assert x is not None
        out = (x @ self._weights.flatten(0, 1).T).view(len(x), samples, -1)  # (M, K, O)
        out = out if self._biases is None else out + self._biases
        return out.transpose(0, 1).flatten(0, 1), ()  # (K·M, O)

    def backward(
        self, grads: tuple[Tensor | None, ...], needed: Sequence[bool], examples: int, saved: Sequence[Tensor]
    ) -> Pieces:
        g = grads[0]
        assert g is not None
        by_sample = g.reshape(len(self._weights), -1, g.shape[-1])
        return (
            None,
            SharedProducts(saved[0].to(g.dtype), by_sample) if needed[1] else None,
            Stacked(g) if needed[2] else None,
        )
