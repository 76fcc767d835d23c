"""Σᵢ rᵢ² of each parameter as backward passes give it: at once, or at the end for parameters with several uses."""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from credo.curvature.loss_factor import SEVERAL_MEANS, Factor, Irregular
from credo.curvature.rule import WIDE, Operation, Outputs, PerExampleGradient, Pieces, chunked_squares, widen
from credo.curvature.torch_private import DisableTorchFunction, is_any_autocast_enabled
from credo.curvature.tracking import ParameterSource
from credo.errors import CallOrderError, InvalidValue, UnsupportedOperation


@dataclass(eq=False, slots=True)
class BackwardPass:
    """One run of the autograd engine: which parameters may be squared at once, and which wait for its end."""

    examples: int  # rows that count as examples
    counted: int  # those of them that the loss is a mean over
    wanted: Container[int]  # ids of the parameters whose gradient was asked for
    single: set[int] | frozenset[int]  # ids of those of them with exactly one use
    deferred: dict[int, list[tuple[ParameterSource, PerExampleGradient]]] = field(default_factory=dict)
    squared: set[int] = field(default_factory=set)

    def join(self, outer: "BackwardPass") -> None:
        """Becomes part of the pass in which it runs: nothing is squared before that one ends."""
        self.examples, self.counted = outer.examples or self.examples, outer.counted or self.counted
        outer.counted = self.counted
        outer.examples = self.examples
        self.single = frozenset()
        self.deferred, self.squared = outer.deferred, outer.squared


@dataclass(frozen=True, slots=True)
class Share:
    """How much of the mean over all examples, or over all their elements, a backward pass was."""

    of_examples: float
    of_elements: float
    open: bool = False  # the others have to show whether it is one

    @property
    def is_whole(self) -> bool:
        return abs(self.of_examples - 1) < 1e-6


WHOLE = Share(1.0, 1.0)


class SquareAccumulator:
    """Σᵢ rᵢ² for each watched parameter, as the backward passes of one block deliver it."""

    # On an accelerator nobody waits for the number of targets that a loss has not ignored: the sum of their weights
    # and how many there are, for whoever reads the rest of the step.
    assumed: tuple[tuple[Tensor, int], ...] = ()

    def __init__(
        self,
        parameters: Mapping[int, Tensor],
        names: Callable[[], Mapping[int, str]],
        reduction: str | None = None,
        constants: set[float] | None = None,
        graphs: set[int] | None = None,
    ):
        """`constants` are known to multiply losses, whatever the batch; new ones are added. So are `graphs`."""
        self.parameters = parameters
        self.constants = set() if constants is None else constants
        self.graphs = set() if graphs is None else graphs  # in which rows were examples
        self.reduction = reduction  # what the loss is declared to be; None: not declared
        self.shares: list[Share] = []  # how much of a mean each backward pass was
        self.has_open_shares = False
        self.names = names
        self.squares: dict[int, Tensor] = {}
        self.counted = True  # whether `examples` is exact, which here it is
        self.examples = 0
        self.rows = 0  # as `examples`, with those that the loss leaves out
        self.likelihood = False  # whether the last loss was one
        self.loss: Tensor | None = None  # the sum of what went back, as far as it was one number
        self.factors: tuple[Factor, ...] = ()  # of the last loss, as far as it was a mean
        self.outer: tuple[Factor, ...] = ()  # with those that made it a mean
        self.witness: tuple[Tensor, int] | None = (
            None  # a parameter whose `.grad` was filled, and its version then
        )
        self.irregular: Irregular | None = None
        self.closed = False
        self.current: BackwardPass | None = None
        self.assumes = False  # whether somebody else checks that no target is ignored: see `assumed`

    def keep(self, current: BackwardPass, keys: Sequence[int], squares: Sequence[Tensor]) -> None:
        """Notes the squares of parameters that one operation alone has used."""
        known, squared, deferred = self.squares, current.squared, current.deferred
        for key, own in zip(keys, squares):  # noqa: B905  (as many by contract; asking takes a while)
            if key in squared or key in deferred:
                self._refuse_hidden_use(key)
            squared.add(key)
            if key in known:
                known[key] += own
            else:
                known[key] = own

    def receive(
        self, current: BackwardPass, sources: Sequence[ParameterSource | None], pieces: Pieces
    ) -> list[Tensor | None]:
        """Notes the per-example gradients of one operation's sources, and gives Σᵢ rᵢ in their place."""
        gradients: list[Tensor | None] = []
        for source, piece in zip(sources, pieces):  # noqa: B905  (as many by contract; asking takes a while)
            if piece is None or isinstance(piece, Tensor):
                gradients.append(piece)
            elif source is not None and source.at_once and (key := source.key) in current.single:
                if key in current.squared or key in current.deferred:
                    self._refuse_hidden_use(key)
                current.squared.add(key)
                total, squares = piece.total_and_squares()
                if not source.is_parameter:
                    squares = source.pull_one(squares, source.roots[0])
                if key in self.squares:
                    self.squares[key] += squares
                else:
                    self.squares[key] = squares if squares.dtype in WIDE else squares.float()
                gradients.append(total)
            else:
                gradients.append(self._defer(current, source, piece))
        return gradients

    def _defer(
        self, current: BackwardPass, source: ParameterSource | None, gradient: PerExampleGradient
    ) -> Tensor:
        """Keeps a gradient until the end of the pass, for parameters that have other uses."""
        for key in map(id, () if source is None else source.roots):
            if key in current.squared:
                self._refuse_hidden_use(key)
            if source is not None and key in current.wanted:
                current.deferred.setdefault(key, []).append((source, gradient))
        return gradient.total()

    def settle(self, finished: BackwardPass) -> None:
        """Squares what had to wait: for each example the sum over all uses first, the square after."""
        for key, uses in finished.deferred.items():
            root = self.parameters[key]

            def summed(start: int, stop: int, root: Tensor = root, uses: list = uses) -> Tensor:  # type: ignore[type-arg]
                parts = [source.pull(part.per_example(start, stop), root) for source, part in uses]
                return torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]

            with torch.no_grad():
                like = widen(root.detach())
                squares = chunked_squares(summed, finished.examples, like)
            self.squares[key] = self.squares[key] + squares if key in self.squares else squares
        if finished.squared or finished.deferred:  # else only gradients of inputs were asked for
            self.examples += finished.counted
            self.rows += finished.examples

    def add_share(self, new: Share) -> None:
        """Raises on several means where a mean over all examples was to be put together."""
        if new.is_whole and any(share.is_whole for share in self.shares):
            raise InvalidValue(SEVERAL_MEANS)
        self.shares.append(new)
        self.has_open_shares = self.has_open_shares or new.open

    def check_shares(self) -> None:
        """At the end of a block: sums that were divided by more than they were over must have become a mean."""
        if not self.has_open_shares:
            return
        totals = [sum(s.of_examples for s in self.shares), sum(s.of_elements for s in self.shares)]
        if all(abs(total - 1) > 1e-4 for total in totals):  # of one example alone the share is not known: NaN
            raise InvalidValue(
                "the losses of this block were divided by more than there were examples: they add up to "
                f"{totals[0]:.4g} of "
                "the mean over all of them. Divide sums by the number of all examples of the block, take means, "
                "or declare "
                "reduction='sum'."
            )

    def require_pass(self) -> BackwardPass:
        if self.closed:
            raise CallOrderError(
                "backward was called after the block in which the forward ran had ended, so the gradient does "
                "not belong to the weights any more. Call loss.backward() inside the block."
            )
        if self.current is None:
            raise CallOrderError(
                "a backward pass began where it could not be seen (on another thread, or inside the engine). "
                "Call loss.backward() on the thread that entered the block."
            )
        return self.current

    def factor(self, reduction: str, scale: float = 1.0) -> float:
        """Σᵢ gᵢ² = factor·Σᵢ rᵢ², rᵢ what example i sent back: gᵢ/M under a mean, times the loss scale."""
        count = self.examples if reduction == "mean" else 1
        return (count / scale) ** 2

    def _refuse_hidden_use(self, key: int) -> None:
        raise UnsupportedOperation(
            f"parameter {self.names()[key]!r} is used both inside and outside a re-entrant checkpoint, so "
            "its uses cannot be added before they are squared. Use torch.utils.checkpoint(..., use_reentrant=False)."
        )


# ────────────────────────────────────────
# The same for users, by parameter.


class Squares(Mapping[Tensor, Tensor]):
    """Parameter → Σᵢ gᵢ²; only the parameters that the loss reached are in it."""

    def __init__(self, accumulator: SquareAccumulator, reduction: str, scale: float):
        # Not a method of `Statistics`: the circle would keep the squares until the garbage collector comes.
        self._accumulator, self._reduction, self._scale = accumulator, reduction, scale

    def __getitem__(self, parameter: Tensor) -> Tensor:
        own = self._accumulator
        try:
            return own.squares[id(parameter)] * own.factor(self._reduction, self._scale)
        except KeyError:
            raise KeyError("the loss did not reach this parameter, or it was not watched") from None

    def __iter__(self) -> Iterator[Tensor]:
        return (self._accumulator.parameters[key] for key in self._accumulator.squares)

    def __len__(self) -> int:
        return len(self._accumulator.squares)


class Statistics:
    """`squares`, parameter → Σᵢ gᵢ² with gᵢ the gradient of example i's own loss; `examples`, their number M."""

    counted = True  # M is exact, not a guess

    def __init__(self, accumulator: SquareAccumulator, reduction: str, scale: float):
        self._accumulator, self._reduction, self._scale = accumulator, reduction, scale

    @cached_property
    def squares(self) -> Mapping[Tensor, Tensor]:
        return Squares(self._accumulator, self._reduction, self._scale)

    @property
    def examples(self) -> int:
        return self._accumulator.examples

    @property
    def loss(self) -> Tensor | None:
        """The sum of what went back, as far as it was one number."""
        return self._accumulator.loss

    @property
    def rows(self) -> int:
        """As `examples`, with those that the loss leaves out."""
        return self._accumulator.rows

    @property
    def likelihood(self) -> bool:
        """Whether the loss was a log-likelihood; else it is an error of unknown scale."""
        return self._accumulator.likelihood

    @property
    def irregular(self) -> Irregular | None:
        """What is unusual about the losses of the block."""
        return self._accumulator.irregular


# ────────────────────────────────────────
# The autograd function that takes the place of a watched operation.


class Watched(torch.autograd.Function):
    """Runs the operation as torch does; its backward gives Σᵢ rᵢ as the gradient and notes Σᵢ rᵢ².

    It stands in for torch's own node, so autograd never computes the weight gradient a second time.
    """

    @staticmethod
    def forward(ctx: Any, operation: Operation, *tensors: Tensor | None) -> Outputs:
        outputs, extras = operation.forward(*tensors)
        ctx.operation = operation
        ctx.save_for_backward(*tensors, *extras)
        if type(outputs) is tuple:
            ctx.set_materialize_grads(False)  # of outputs that the loss does not reach
        return outputs

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise UnsupportedOperation(
            f"{ctx.operation.name} runs in forward mode (torch.autograd.forward_ad), where gradients of single "
            "examples cannot be followed. Take derivatives by inputs with torch.autograd.grad outside the block."
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        operation: Operation = ctx.operation
        needed = ctx.needs_input_grad[1:]
        if grads[0] is None and all(grad is None for grad in grads):
            return (None,) * (len(needed) + 1)
        accumulator = operation.watched_by
        current = accumulator.current or accumulator.require_pass()
        saved = ctx.saved_tensors  # a checkpoint runs its forward again here, so the block must still see it
        with _plain_torch(saved) if is_any_autocast_enabled() else DisableTorchFunction():
            if current.single.issuperset(keys := operation.watched_keys) and keys:
                sums = operation.sums(grads, needed, current.examples, saved)
                if sums is not None:
                    accumulator.keep(current, keys, sums[1])
                    return None, *sums[0]
            pieces = operation.backward(grads, needed, current.examples, saved)
            return None, *accumulator.receive(current, operation.watched_sources, pieces)


def _plain_torch(tensors: tuple[Tensor, ...]) -> AbstractContextManager[Any]:
    """The backward pass is not watched itself, and runs in the dtypes that the forward chose."""
    device = next(tensor for tensor in tensors if tensor is not None).device.type
    return _without_autocast(device) if torch.is_autocast_enabled(device) else DisableTorchFunction()


@contextmanager
def _without_autocast(device: str) -> Iterator[None]:
    with DisableTorchFunction(), torch.autocast(device, enabled=False):
        yield
