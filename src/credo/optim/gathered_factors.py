"""What the samples of a K-FAC step have said: Kronecker factors and squares where they were refreshed."""

from collections.abc import Iterable, Sequence
from typing import final

import torch
from torch import Tensor

from credo.curvature.kronecker import FactorStatistics, LayerSums
from credo.optim.gathering import Gathered, Seen


@final
class GatheredFactors(Gathered):
    """`layers` and `squares` hold sums over samples of each sample's own means, by the parameter's id."""

    def __init__(self) -> None:
        super().__init__()
        self.fresh = False  # whether factors were gathered at all
        self.layers: dict[int, LayerSums] = {}
        self.squares: dict[int, Tensor] = {}
        self._norms: list[Tensor] = []

    def _add(self, seen: Seen, parameters: Sequence[Tensor]) -> None:
        if not isinstance(seen, FactorStatistics):
            self._check_norms(parameters)
            return
        self.fresh = True
        found = seen.found()
        for key, sums in found.layers.items():
            means = LayerSums(
                sums.weight, sums.bias, sums.inputs / found.examples, sums.outputs * found.unit
            )
            if key in self.layers:
                self.layers[key].add(means)
            else:
                self.layers[key] = means
        for key, squares in found.squares.items():
            mean = squares * found.unit
            self.squares[key] = self.squares[key] + mean if key in self.squares else mean

    def _check_norms(self, parameters: Sequence[Tensor]) -> None:
        """A gradient whose square overflows is refused by every step, not only by those that square it."""
        grads = [p.grad for p in parameters if p.grad is not None]
        if grads:
            self._norms += [norm.square() for norm in torch._foreach_norm(grads)]

    def tensors(self) -> Iterable[Tensor]:
        factors = [factor for sums in self.layers.values() for factor in (sums.inputs, sums.outputs)]
        return [*factors, *self.squares.values(), *self._norms]
