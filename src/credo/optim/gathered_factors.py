"""What the samples of a K-FAC step have said: Kronecker factors and squares where they were refreshed."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from credo.curvature.kronecker import FactorStatistics, LayerSums
from credo.optim.gathering import Gathered, Seen
from credo.optim.sharing import Slot, table_slot


@dataclass(frozen=True)
class Expected:
    """A layer whose factors are due, also for a rank whose own share of the batch is empty."""

    weight: Tensor
    bias: Tensor | None
    inputs: torch.Size
    outputs: torch.Size


@final
class GatheredFactors(Gathered):
    """`layers` and `squares` hold sums over samples of each sample's own means, by the parameter's id."""

    def __init__(self, expect: Callable[[list[Expected]], list[Expected] | None]) -> None:
        """`expect` says, from the layers this rank has seen, which ones any rank has; None at steps that only move."""
        super().__init__()
        self._expect = expect
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
            means = LayerSums(sums.weight, sums.bias, sums.inputs / found.examples, sums.outputs * found.unit)
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

    def slots(self, parameters: Sequence[Tensor], mean_loss: bool) -> list[Slot]:
        """At a refresh, squares for every parameter and factors for every layer, all means over examples."""
        own = [Expected(s.weight, s.bias, s.inputs.shape, s.outputs.shape) for s in self.layers.values()]
        expected = self._expect(own)
        if expected is None:
            return []
        known = {id(e.weight): e for e in expected}
        self.fresh = True
        layers = [known[id(p)] for p in parameters if id(p) in known]
        return [slot for e in layers for slot in self._layer_slots(e)] + [
            table_slot(self.squares, p, True) for p in parameters
        ]

    def _layer_slots(self, layer: Expected) -> list[Slot]:
        own = self.layers.get(id(layer.weight))

        def take_inputs(weight: Tensor, total: Tensor) -> None:
            empty = total.new_zeros(layer.outputs)
            self.layers[id(weight)] = LayerSums(weight, layer.bias, total, empty)

        def take_outputs(weight: Tensor, total: Tensor) -> None:
            self.layers[id(weight)].outputs = total

        return [
            Slot(layer.inputs, None if own is None else own.inputs, True, 1.0, layer.weight, take_inputs),
            Slot(layer.outputs, None if own is None else own.outputs, True, 1.0, layer.weight, take_outputs),
        ]

    def tensors(self, parameters: Sequence[Tensor]) -> Iterable[Tensor]:
        factors = [factor for sums in self.layers.values() for factor in (sums.inputs, sums.outputs)]
        return [*factors, *self.squares.values(), *self._norms]
