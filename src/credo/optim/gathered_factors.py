"""What the samples of a K-FAC step have said: Kronecker factors and squares where they were refreshed."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from credo.curvature.kronecker import FactorStatistics, LayerSums
from credo.optim.columns import Column, Sums, tabled
from credo.optim.gathering import Gathered, Seen


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

    def _add(self, seen: Seen, parameters: Sequence[Tensor], examples: int) -> None:
        if not isinstance(seen, FactorStatistics):
            self._check_norms(parameters)
            return
        self.fresh, self.likelihood = True, seen.likelihood
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

    def columns(self, parameters: Sequence[Tensor], mean_loss: bool) -> list[Column]:
        """At a refresh, factors for every layer and squares for every parameter, all means over examples."""
        own = [Expected(s.weight, s.bias, s.inputs.shape, s.outputs.shape) for s in self.layers.values()]
        expected = self._expect(own)
        if expected is None:
            return []
        self.fresh = True
        return [*self._factor_columns(expected), tabled(self.squares, parameters, True)]

    def _factor_columns(self, layers: Sequence[Expected]) -> list[Column]:
        own = [self.layers.get(id(layer.weight)) for layer in layers]
        weights = [layer.weight for layer in layers]

        def take_inputs(owners: Sequence[Tensor], sums: Sums) -> None:
            for layer, total in zip(layers, sums, strict=True):
                assert total is not None  # of each of these layers some rank has factors
                empty = total.new_zeros(layer.outputs)
                self.layers[id(layer.weight)] = LayerSums(layer.weight, layer.bias, total, empty)

        def take_outputs(owners: Sequence[Tensor], sums: Sums) -> None:
            for layer, total in zip(layers, sums, strict=True):
                assert total is not None
                self.layers[id(layer.weight)].outputs = total

        inputs = [None if sums is None else sums.inputs for sums in own]
        outputs = [None if sums is None else sums.outputs for sums in own]
        return [
            Column(weights, [layer.inputs for layer in layers], inputs, True, 1.0, take_inputs),
            Column(weights, [layer.outputs for layer in layers], outputs, True, 1.0, take_outputs),
        ]

    def by_parameter(self) -> Iterable[tuple[int, Tensor]]:
        factors = [(key, f) for key, sums in self.layers.items() for f in (sums.inputs, sums.outputs)]
        return [*factors, *self.squares.items()]

    def tensors(self, parameters: Sequence[Tensor]) -> Iterable[Tensor]:
        factors = [factor for sums in self.layers.values() for factor in (sums.inputs, sums.outputs)]
        return [*factors, *self.squares.values(), *self._norms]
