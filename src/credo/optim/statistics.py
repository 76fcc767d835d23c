"""What the samples since the last update have said, as sums over them; and how far a training has come, by its loss."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, cast, final

import torch
from torch import Tensor

from credo.curvature.accumulate import SquareAccumulator
from credo.curvature.kronecker import FactorStatistics, LayerSums
from credo.curvature.loss_factor import Factor, Irregular, Unscaled
from credo.distributed.agreement import Expected
from credo.distributed.reduce import NamedSums, Sums, tabled
from credo.errors import UnsupportedOperation
from credo.kernels.flags import Flags, read
from credo.kernels.tensors import by_device, is_on_cpu
from credo.kernels.update import all_finite

if TYPE_CHECKING:
    from credo.distributed.fully_sharded import Move
    from credo.optim.local_reparameterisation import Reparameterised


class Observation(Protocol):
    """What the backward passes of one block have said."""

    @property
    def examples(self) -> int:
        """How many examples went back; 0 as long as there was no backward pass."""

    @property
    def counted(self) -> bool:
        """Whether that number is exact; else it is 1 for each backward pass."""

    @property
    def loss(self) -> Tensor | None:
        """What went back, if it was one number: the sum over the backward passes."""

    @property
    def irregular(self) -> Irregular | None:
        """What is unusual about the losses."""


@dataclass(eq=False)
class StepStatistics(ABC):
    """Sums over the samples of one step."""

    samples: int = 0
    examples: int = 0  # of all samples together
    scale: float | None = None  # what the losses were multiplied by, where it was declared
    loss: Tensor | None = None  # of the step, where it has one
    gradient_scale: float = 1.0  # what the loss was multiplied by, as it still is in `.grad`,
    squares_scale: float = 1.0  # and as it is in what was gathered
    gradient_unit: float = 1.0  # ĝ = unit · `.grad`: undoes samples, under a sum examples, and the loss scale
    share: float = 1.0  # of a mean that all losses together were, where `.grad` has been made whole
    weight: float = 1.0  # w of a new iterate in the mean, where that is an average
    likelihood: bool = False  # whether the loss was the negative log-probability of discrete targets
    losses: tuple[Tensor, ...] = ()  # of the samples, as far as they were single numbers
    vectorized: bool = False  # all samples of the step at once, under a mean loss
    factors: tuple[Factor, ...] = ()  # of the last loss, if it was a mean and one backward pass a block
    unscaled: Unscaled | None = None  # `.grad` of the samples so far, where the loss has factors
    noted: Tensor | None = None  # the loss that is looked at after the step,
    number: float | None = None  # and its value, once it was read
    # What else the host wants to know of an accelerator, and who takes it: all is read together.
    asked: list[tuple[Tensor, Callable[[float], None]]] = field(default_factory=list)
    # Whether all that is gathered is read from `.grad`, at the end of a block.
    reads_gradients: ClassVar[bool] = False
    # Whether a sample is of weights, which all micro-batches of an update then have in common.
    shares_samples: ClassVar[bool] = True

    @final
    def add(
        self, seen: Observation, parameters: Sequence[Tensor], examples: int, scale: float | None
    ) -> None:
        """Adds one sample of so many examples, whose own gradient is in `.grad`."""
        self._add(seen, parameters, examples)
        self.samples += 1
        self.examples += examples
        self.scale, loss = scale, seen.loss
        self.losses += () if loss is None else (loss.detach(),)

    @final
    def mean_loss(self) -> Tensor | None:
        """Of the samples; None where one of them is not known."""
        known = self.losses and len(self.losses) == self.samples
        return torch.stack([loss.double() for loss in self.losses]).mean() if known else None

    @final
    def at_once(self) -> None:
        """The blocks were parts of one mean loss over all samples."""
        self.samples, self.vectorized = 1, True

    @final
    def finite(self, parameters: Sequence[Tensor], loss: Tensor | None) -> bool:
        """Whether the loss, all gradients and all sums are."""
        numbers = [p.grad for p in parameters if p.grad is not None]
        numbers += [] if loss is None else [loss]
        numbers += self.tensors(parameters)
        if all(map(is_on_cpu, numbers)):
            return all_finite(numbers)
        here = [tensor for tensor in numbers if tensor.is_cpu]
        elsewhere = [tensor for tensor in numbers if not tensor.is_cpu]
        return (not here or all_finite(here)) and self.judge(Flags(elsewhere))

    @final
    def flags(self, parameters: Sequence[Tensor]) -> Flags | None:
        """Whether all numbers are finite, where the accelerators can keep that for themselves: none is on the CPU."""
        numbers = [p.grad for p in parameters if p.grad is not None]
        numbers += [*([] if self.loss is None else [self.loss]), *self.tensors(parameters)]
        return None if any(map(is_on_cpu, numbers)) else Flags(numbers)

    @final
    def judge(self, flags: Flags | None) -> bool:
        """Whether all was finite, or known to be; if so, who has asked is told. By one wait for each device."""
        if flags is None and not self.asked:
            return True
        unknown = self.noted is not None and self.number is None and not self.noted.is_cpu
        losses = [self.noted] if unknown and self.noted is not None else []
        own = [] if flags is None else [flags.first]
        answers = read([*own, *losses, *(tensor for tensor, _ in self.asked)])
        asked, self.asked = self.asked, []
        if flags is not None and not answers.pop(0)[0]:
            return False
        if losses:
            self.number = answers.pop(0)[0]
        for (_, take), numbers in zip(asked, answers, strict=True):
            take(numbers[0])
        return True

    @final
    def ask(
        self,
        tensors: Sequence[Tensor],
        reduce: Callable[[list[Tensor]], Sequence[Tensor]],
        take: Callable[[int, float], None],
    ) -> None:
        """The numbers that `reduce` makes of tensors on one device are read with the rest; `take` gets each."""
        for places in by_device(tensors):
            numbers = reduce([tensors[k] for k in places])
            self.asked += [(number, partial(take, k)) for k, number in zip(places, numbers, strict=True)]

    def localise(self, seen: Any, move: "Move") -> None:
        """Gives what a block has said of whole parameters as sums over the ranks, by their parts."""
        return

    @abstractmethod
    def _add(self, seen: Observation, parameters: Sequence[Tensor], examples: int) -> None:
        """Adds what this method wants to know of one sample."""

    @abstractmethod
    def columns(self, parameters: Sequence[Tensor], mean_loss: bool) -> list[NamedSums]:
        """What the ranks of a world must add up, beside the gradients; the same places on all of them."""

    @abstractmethod
    def by_parameter(self) -> Iterable[tuple[int, Tensor]]:
        """The ids of parameters with what was gathered of each, beside its gradient."""

    @abstractmethod
    def tensors(self, parameters: Sequence[Tensor]) -> Iterable[Tensor]:
        """Everything that must be finite, beside the gradients of the parameters."""


@final
@dataclass(eq=False)
class SquareStatistics(StepStatistics):
    """`squares` holds Σₖ Σᵢ rᵢ² by the parameter's id; the ĥ of one sample is `unit` times its Σᵢ rᵢ²."""

    squares: dict[int, Tensor] = field(default_factory=dict)
    unit: float = 1.0
    supplied: bool = False  # whether the gradient was taken at the parameters, by whoever supplied it
    # Σ of targets that count, and how many there are: that these agree is checked with the rest of the step.
    assumed: tuple[tuple[Tensor, int], ...] = ()

    def _add(self, seen: Observation, parameters: Sequence[Tensor], examples: int) -> None:
        """ĥ is the mean over a sample's own examples, so samples count alike."""
        assert isinstance(seen, SquareAccumulator)
        self.likelihood = seen.likelihood
        self.assumed += seen.assumed
        # What examples have sent back is gᵢ/M under a mean, and ĥ the mean of gᵢ².
        sums, unit = seen.squares, (float(examples) ** 2 if seen.reduction == "mean" else 1.0) / examples
        if not self.samples:
            self.squares, self.unit = dict(sums), unit
            return
        for key, raw in sums.items():
            own = raw if unit == self.unit else raw * (unit / self.unit)
            if key in self.squares:
                self.squares[key] += own
            else:
                self.squares[key] = own

    def localise(self, seen: Any, move: "Move") -> None:
        seen.squares = move(seen.squares, 2)

    def columns(self, parameters: Sequence[Tensor], mean_loss: bool) -> list[NamedSums]:
        """ĥ, which is a mean over the examples whatever the loss is; its unit is 1 from then on."""
        unit, self.unit = self.unit, 1.0
        return [tabled(self.squares, parameters, True, unit)]

    def supply(self, squares: dict[int, Tensor], examples: int) -> None:
        """Squares that were not taken in a block: one sample of `examples`."""
        self.samples, self.examples, self.squares = 1, examples, squares
        self.unit, self.vectorized, self.supplied = 1 / examples, True, True

    def mean_squares(self, p: Tensor) -> Tensor:
        """ĥ of a parameter that the loss has reached, without a loss scale."""
        return self.squares[id(p)] * (self.unit / (self.samples * self.squares_scale**2))

    def by_parameter(self) -> Iterable[tuple[int, Tensor]]:
        return self.squares.items()

    def tensors(self, parameters: Sequence[Tensor]) -> Iterable[Tensor]:
        if not self.assumed:
            return self.squares.values()
        agree = [(total - (count - 1)).log_() for total, count in self.assumed]  # finite if total is count
        return [*self.squares.values(), *agree]

    def corrected(self) -> bool:
        """Whether a step was refused because targets were left out (`ignore_index`); then their number is known now."""
        assumed, self.assumed = self.assumed, ()
        left = [count - round(float(total)) for total, count in assumed]
        if not any(left) or sum(left) >= self.examples:
            return False
        self.examples -= sum(left)
        self.unit = float(self.examples)
        return True


@dataclass(eq=False)
class TableStatistics(StepStatistics):
    """`table` holds the sums by the parameter's id; they are as the loss is: means or sums over the examples."""

    table: dict[int, Tensor] = field(default_factory=dict)
    counted: bool = True  # whether the numbers of examples are exact

    @final
    def _add(self, seen: Observation, parameters: Sequence[Tensor], examples: int) -> None:
        self.counted = self.counted and seen.counted
        self.likelihood = getattr(seen, "likelihood", False)
        self._add_to_table(seen)

    @abstractmethod
    def _add_to_table(self, seen: Observation) -> None:
        """Adds what one block has said."""

    @final
    def columns(self, parameters: Sequence[Tensor], mean_loss: bool) -> list[NamedSums]:
        if not self.counted:
            raise UnsupportedOperation(
                "the number of examples cannot be read from the operations of this model, and ranks are weighed by "
                "it. Train in one process."
            )
        return [tabled(self.table, parameters, mean_loss)]

    @final
    def by_parameter(self) -> Iterable[tuple[int, Tensor]]:
        return self.table.items()

    @final
    def tensors(self, parameters: Sequence[Tensor]) -> Iterable[Tensor]:
        """Norms: the updates square these numbers, and what overflows there would stay for ever."""
        numbers = [*self._gradients(parameters), *self.table.values()]
        return torch._foreach_norm(numbers) if numbers else ()

    @abstractmethod
    def _gradients(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """The gradients that the update squares."""


class Said(NamedTuple):
    """What a block says of one parameter: the `.grad` of this."""

    variance: Tensor


def with_gradient(grad: Tensor) -> Tensor:
    leaf = torch.empty_like(grad)
    leaf.grad = grad
    return leaf


@final
class VarianceStatistics(TableStatistics):
    """Σₖ ∂ℓ/∂σ², taken from the leaves of each block."""

    shares_samples: ClassVar[bool] = False  # the noise is of outputs: every example has its own

    def _add_to_table(self, seen: Observation) -> None:
        for key, belief in cast("Reparameterised", seen).uncertain.items():
            grad = belief.variance.grad
            if grad is not None:
                self.table[key] = self.table[key].add_(grad) if key in self.table else grad

    def localise(self, seen: Any, move: "Move") -> None:
        own = {key: b.variance.grad for key, b in seen.uncertain.items() if b.variance.grad is not None}
        seen.uncertain = {key: Said(with_gradient(part)) for key, part in move(own, 1).items()}

    def _gradients(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        return [p.grad for p in parameters if p.grad is not None]


@final
class ProductStatistics(TableStatistics):
    """Σₖ ∂ℓ/∂w·(w − μ), in memory of the optimiser's, which each block has filled as it closed."""

    reads_gradients: ClassVar[bool] = True

    def _add_to_table(self, seen: Observation) -> None:
        pass

    def _gradients(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Of those without noise only: where there is noise, a gradient that overflows shows in the product."""
        return [p.grad for p in parameters if p.grad is not None and id(p) not in self.table]


@final
@dataclass(eq=False)
class LayerStatistics(StepStatistics):
    """`layers` and `squares` hold sums over samples of each sample's own means, by the parameter's id.

    `expect` says, from the layers this rank has seen, which ones any rank has; None at steps that only move.
    """

    expect: Callable[[list[Expected]], list[Expected] | None] = lambda own: own
    fresh: bool = False  # whether factors were gathered at all
    layers: dict[int, LayerSums] = field(default_factory=dict)
    squares: dict[int, Tensor] = field(default_factory=dict)
    _norms: list[Tensor] = field(default_factory=list)

    def _add(self, seen: Observation, parameters: Sequence[Tensor], examples: int) -> None:
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

    def columns(self, parameters: Sequence[Tensor], mean_loss: bool) -> list[NamedSums]:
        """At a refresh, factors for every layer and squares for every parameter, all means over examples."""
        own = [Expected(s.weight, s.bias, s.inputs.shape, s.outputs.shape) for s in self.layers.values()]
        expected = self.expect(own)
        if expected is None:
            return []
        self.fresh = True
        return [*self._factor_columns(expected), tabled(self.squares, parameters, True)]

    def _factor_columns(self, layers: Sequence[Expected]) -> list[NamedSums]:
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
            NamedSums(weights, [layer.inputs for layer in layers], inputs, True, 1.0, take_inputs),
            NamedSums(weights, [layer.outputs for layer in layers], outputs, True, 1.0, take_outputs),
        ]

    def by_parameter(self) -> Iterable[tuple[int, Tensor]]:
        factors = [(key, f) for key, sums in self.layers.items() for f in (sums.inputs, sums.outputs)]
        return [*factors, *self.squares.items()]

    def tensors(self, parameters: Sequence[Tensor]) -> Iterable[Tensor]:
        factors = [factor for sums in self.layers.values() for factor in (sums.inputs, sums.outputs)]
        return [*factors, *self.squares.values(), *self._norms]


# ────────────────────────────────────────
# How far a training has come, as its loss shows it: what the noise of the default rule follows.
#
# While examples are new, the training loss is the test loss, and noise only costs time. Later the examples repeat.
# The training loss then falls further because the network learns its examples by heart, and noise is what holds it
# back. So one loss is remembered: the running mean after 3 passes over the data, and 300 steps at least. By then the
# network has found most of what generalises. The noise grows with the passes while the loss is well below that level,
# and shrinks twice as fast while it is not. It settles where the training loss stays near what the test loss can be.

FIRST = 20  # losses that say where a training began
SEEN_PASSES, SEEN_STEPS = 3.0, 300  # after both, the running mean is remembered
LOW = 0.7  # of the remembered loss: below it the noise grows
LOWEST_START = 0.1  # of the first losses: so low before those steps, few examples are learnt by heart already
HIGHEST = 0.45  # of the first losses: the noise never grows above it
PASSES = 3.0  # over the data, in which the noise has grown by what it was at first
LARGEST_GROWTH = 20.0
LONGEST = 0.3  # of a pass that one step counts as: large batches have few steps to learn in
SLOWEST = 0.02  # weight of the newest loss in the mean, at least


@dataclass
class Progress:
    """`growth` is what the noise is multiplied by. All of it is part of an optimiser's saved state."""

    losses: int = 0
    passes: float = 0.0
    first: float = 0.0  # mean of the first ones
    mean: float = 0.0  # of the last ones
    seen: float | None = None  # the mean when examples had been seen a few times
    growth: float = 1.0

    def follow(self, loss: float | None, passes: float) -> None:
        """After a step over so many passes; without a loss nothing is known, and nothing changes."""
        if loss is None:
            return
        share = min(passes, LONGEST)
        self.losses += 1
        self.passes += passes
        self.mean += max(1 / self.losses, share, SLOWEST) * (loss - self.mean)
        if self.losses <= FIRST:
            self.first += (loss - self.first) / self.losses
            return
        if self.mean < 0:  # a density after all, whose logarithm has an arbitrary constant
            self.growth = 1.0
            return
        if self.seen is None and self.losses >= SEEN_STEPS and self.passes >= SEEN_PASSES:
            self.seen = self.mean
        change = share / PASSES if self.mean < self._level() else -2 * share / PASSES
        self.growth = min(max(self.growth + change, 1.0), LARGEST_GROWTH)

    def _level(self) -> float:
        """The loss below which the noise grows."""
        if self.seen is None:
            return LOWEST_START * self.first
        return min(LOW * self.seen, HIGHEST * self.first)

    def state(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> "Progress":
        """From a saved state, which may be older than this."""
        return cls(**saved.get("progress", {}))
