"""Kronecker factors from one ordinary backward pass, by the same interception as the squared gradients.

    A = mean of aᵢaᵢᵀ,   G = mean of gᵢgᵢᵀ

over examples, a the input of a layer with a 1 appended for the bias, g the gradient of an example's own loss with
respect to its output. Layers with positions (sequences, convolutions) are in `curvature.factors`. Everything without
such a rule, and every weight that is used more than once, keeps its exact squared gradients instead.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from credo.curvature.accumulate import SquareAccumulator, Statistics
from credo.curvature.factors import SHARINGS
from credo.curvature.intercept import Interception, Watch
from credo.curvature.rule import Operation, Outputs, PerExampleGradient, Pieces
from credo.curvature.tracking import ParameterSource, WatchedParameters, watched_parameters
from credo.curvature.uncompiled import uncompiled
from credo.errors import InvalidType, InvalidValue, UnsupportedOperation


@dataclass
class LayerSums:
    """One layer: its parameters, Σ aaᵀ and Σ rrᵀ over the examples so far, r = g/M under a mean loss."""

    weight: Tensor
    bias: Tensor | None
    inputs: Tensor
    outputs: Tensor

    def add(self, other: "LayerSums") -> None:
        self.inputs += other.inputs
        self.outputs += other.outputs


class Factoring:
    """Sees to it that watched layers leave their factors; `layers` is what they left, by the weight's id."""

    def __init__(self, sharing: str):
        self.layers: dict[int, LayerSums] = {}
        self.reused: list[Tensor] = []  # weights of layers that were used more than once
        self.recording = True
        self.accumulator: SquareAccumulator  # of the block it works in
        self._sharing = sharing
        self.needs_rules = False  # operations without one keep their squares

    def apply(
        self, operation: Operation, sources: tuple[ParameterSource | None, ...], watch: Watch
    ) -> object:
        weight = None if operation.layer is None else sources[operation.layer[0]]
        has_factors = weight is not None and weight.is_parameter
        return watch(Factored(operation, sources, self) if has_factors else operation, sources)

    def run(self, func: Callable[..., object], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
        return func(*args, **kwargs)

    def refuse_backward(self) -> None:
        """Any number of backward passes may run."""

    def run_without_rule(
        self, func: Callable[..., object], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> object:
        return func(*args, **kwargs)

    def derive(self, function: object, make: object, made: object) -> None:
        """Computing with parameters is no obstacle: such weights keep their squares."""

    def refuse_left_out(self, counted: int, examples: int) -> None:
        raise InvalidValue(
            f"{counted} losses for {examples} examples: the Kronecker factors of the inputs would be over all of "
            "them. Leave examples without a loss out of the batch, before the model."
        )

    def take(self, operation: Operation, sources: Sequence[ParameterSource | None], pieces: Pieces) -> Pieces:
        """Notes the factors of a layer's only use, and leaves plain gradients in place of per-example ones."""
        assert operation.layer is not None
        slot, bias_slot = operation.layer
        piece, source = pieces[slot], sources[slot]
        if not isinstance(piece, PerExampleGradient) or source is None:
            return pieces
        weight, bias = source.roots[0], self._bias(sources[bias_slot], pieces[bias_slot])
        members = [weight] if bias is None else [weight, bias]
        if not self._only_use(members):
            return pieces
        if self.recording:
            self._note(weight, bias, piece)
        self.accumulator.require_pass().squared.update(map(id, members))
        slots = {slot} if bias is None else {slot, bias_slot}
        return [
            p.total() if k in slots and isinstance(p, PerExampleGradient) else p for k, p in enumerate(pieces)
        ]

    def _only_use(self, members: list[Tensor]) -> bool:
        current = self.accumulator.require_pass()
        if not all(id(p) in current.wanted for p in members):
            return False
        single = all(id(p) in current.single for p in members)
        if not single:
            self.reused.append(members[0])
        return single

    def _bias(
        self, source: ParameterSource | None, piece: Tensor | PerExampleGradient | None
    ) -> Tensor | None:
        """The bias that belongs to the layer: a parameter itself, whose gradient is asked for."""
        asked = source is not None and source.is_parameter and isinstance(piece, PerExampleGradient)
        return source.roots[0] if asked and source is not None else None

    def _note(self, weight: Tensor, bias: Tensor | None, piece: PerExampleGradient) -> None:
        factors = piece.factors(bias is not None, self._sharing)
        assert factors is not None
        new = LayerSums(weight, bias, *factors)
        if id(weight) in self.layers:
            self.layers[id(weight)].add(new)
        else:
            self.layers[id(weight)] = new


class Factored(Operation):
    """An operation with a weight, a bias and Kronecker factors; runs as the operation itself."""

    def __init__(
        self, operation: Operation, sources: tuple[ParameterSource | None, ...], factoring: Factoring
    ):
        self._operation, self._sources, self._factoring = operation, sources, factoring
        self.tensors, self.parameter_slots = operation.release(), operation.parameter_slots
        self.name, self.layer = operation.name, operation.layer
        self.lead, self.merged_from, self.axis = operation.lead, operation.merged_from, operation.axis

    def forward(self, *tensors: Tensor | None) -> tuple[Outputs, tuple[Tensor, ...]]:
        return self._operation.forward(*tensors)

    def backward(
        self, grads: tuple[Tensor | None, ...], needed: Sequence[bool], examples: int, saved: Sequence[Tensor]
    ) -> Pieces:
        pieces = self._operation.backward(grads, needed, examples, saved)
        return self._factoring.take(self._operation, self._sources, pieces)


@dataclass
class FactorSums:
    """Sums over `examples`; `unit` makes a mean of squares of what was sent back, Σ rrᵀ or Σ r²."""

    layers: dict[int, LayerSums]
    squares: dict[int, Tensor]
    examples: int
    unit: float


class FactorStatistics(Statistics):
    """As `Statistics`, with the factors of layers, whose parameters have no squares.

    The backward passes give the empirical Fisher. Where `fisher` is true they count examples only, and `observe` is
    what gives the factors.
    """

    def __init__(self, factoring: Factoring, reduction: str, fisher: bool):
        super().__init__(factoring.accumulator, reduction, 1.0)
        self.factoring = factoring
        factoring.recording = not fisher
        self._fisher: FactorSums | None = FactorSums({}, {}, 0, 1.0) if fisher else None

    def found(self) -> FactorSums:
        if self._fisher is not None:
            return self._fisher
        own = self._accumulator
        unit = own.factor(self._reduction) / max(own.examples, 1)
        return FactorSums(self.factoring.layers, own.squares, own.examples, unit)

    def observe(self, loss: Tensor, parameters: list[Tensor]) -> None:
        """The factors of `loss`, a sum over the examples, by a backward pass of its own; the graph stays."""
        accumulator, own = self._accumulator, self._fisher
        assert own is not None
        before = accumulator.squares, accumulator.examples, accumulator.loss
        accumulator.squares, accumulator.examples = {}, 0
        declared = accumulator.reduction
        accumulator.reduction = None  # this one is a sum, whatever the user's is
        self.factoring.recording = True
        try:
            torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
            own.layers, own.examples = self.factoring.layers, own.examples + accumulator.examples
            own.squares = {k: own.squares.get(k, 0) + square for k, square in accumulator.squares.items()}
        finally:
            self.factoring.recording, accumulator.reduction = False, declared
            accumulator.squares, accumulator.examples, accumulator.loss = before
        own.unit = 1 / max(own.examples, 1)


@contextmanager
def watching_factors(
    parameters: WatchedParameters,
    reduction: str,
    sharing: str = "expand",
    examples: int | None = None,
    fisher: bool = False,
) -> Iterator[FactorStatistics]:
    """A block in which backward passes also give Kronecker factors, and squares for what has none."""
    factoring = Factoring(sharing)
    interception = Interception(parameters, examples, factoring, reduction)
    factoring.accumulator = interception.accumulator
    try:
        with interception:
            yield FactorStatistics(factoring, reduction, fisher)
        interception.accumulator.check_shares()
    finally:
        interception.accumulator.closed = True


def kronecker_factors(
    model: torch.nn.Module,
    loss: Callable[[], Tensor],
    reduction: str = "mean",
    *,
    sharing: str = "expand",
    examples: int | None = None,
) -> dict[str, tuple[Tensor, Tensor]]:
    """Layer name of `model` → (A, G) for the loss that `loss()` returns; the bias is A's last row and column.

    vec is column-stacked: A ⊗ G stands for the mean of vec(∇[W b])vec(∇[W b])ᵀ. `sharing` says how the
    positions of one example are treated, "expand" or "reduce". Linear layers and convolutions are in it (with groups,
    as stacks of matrices); one that is used more than once has no such factors and raises. `.grad` is left alone.
    `reduction` and `examples` are those of `capture`.
    """
    if reduction not in ("mean", "sum"):
        raise InvalidValue(f"reduction must be 'mean' or 'sum', as the loss is; got {reduction!r}.")
    if sharing not in SHARINGS:
        raise InvalidValue(f"sharing must be one of {', '.join(map(repr, SHARINGS))}; got {sharing!r}.")
    parameters = watched_parameters(model)
    with uncompiled(watching_factors(parameters, reduction, sharing, examples)) as stats:
        value = loss()
        if not isinstance(value, Tensor) or value.numel() != 1:
            got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise InvalidType(f"loss must return one number, the {reduction} over examples; got {got}.")
        torch.autograd.grad(value.sum(), list(parameters.watched.values()), allow_unused=True)
    _refuse_reused(stats.factoring.reused, parameters.names())
    found, names = stats.found(), parameters.names()
    return {
        layer_name(names[id(p)]): (sums.inputs / found.examples, sums.outputs * found.unit)
        for p in parameters.watched.values()
        if (sums := found.layers.get(id(p)))
    }


def layer_name(weight: str) -> str:
    """The module that holds a weight: "fc" for "fc.weight"; another parameter stands for itself."""
    return "" if weight == "weight" else weight.removesuffix(".weight")


def _refuse_reused(weights: list[Tensor], names: Mapping[int, str]) -> None:
    if weights:
        raise UnsupportedOperation(
            f"{names[id(weights[0])]!r} is used more than once in one backward pass (a tied or reused layer), where "
            "its Kronecker factors are not defined. Leave it out by freezing it; KFAC keeps its exact squares."
        )
