"""Exact squared per-example gradients from one ordinary backward pass.

    with credo.capture(model) as stats:
        F.cross_entropy(model(x), y).backward()
    stats.squares[p]      # Σᵢ gᵢ², gᵢ the gradient of example i's own loss

Inside the block every operation on a watched parameter is found by the parameter's identity and
replaced by one that gives the same result, the same gradient, and the sum of squares beside it.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from credo.curvature.accumulate import SquareAccumulator
from credo.curvature.intercept import Interception
from credo.curvature.loss_factor import Irregular
from credo.curvature.many_samples import StackedWeights
from credo.curvature.rule import widen
from credo.curvature.tracking import Parameters, WatchedParameters, watched_parameters
from credo.errors import CallOrderError, InvalidType, InvalidValue

# ────────────────────────────────────────
# What the backward passes of one block said about each parameter.


class Squares(Mapping[Tensor, Tensor]):
    """Parameter → Σᵢ gᵢ²; only the parameters that the loss reached are in it."""

    def __init__(self, accumulator: SquareAccumulator, reduction: str, scale: float):
        # Not a method of `Statistics`: the circle would keep the squares until the garbage collector comes.
        self._accumulator, self._reduction, self._scale = accumulator, reduction, scale

    def __getitem__(self, parameter: Tensor) -> Tensor:
        try:
            return self._accumulator.squares[id(parameter)] * factor(
                self._accumulator, self._reduction, self._scale
            )
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

    def raw(self) -> tuple[dict[int, Tensor], float]:
        """Σᵢ rᵢ² by the parameter's id, not copies, and by what it is to be multiplied for Σᵢ gᵢ²."""
        return self._accumulator.squares, factor(self._accumulator, self._reduction, self._scale)


def factor(accumulator: SquareAccumulator, reduction: str, scale: float) -> float:
    """Σᵢ gᵢ² = factor·Σᵢ rᵢ², rᵢ what example i sent back: gᵢ/M under a mean, times the loss scale."""
    count = accumulator.examples if reduction == "mean" else 1
    return (count / scale) ** 2


# ────────────────────────────────────────


def capture(
    parameters: Parameters, reduction: str = "mean", *, scale: float = 1.0, examples: int | None = None
) -> AbstractContextManager[Statistics]:
    """A block in which ordinary backward passes also give Σᵢ gᵢ².

    parameters: a module, `parameters()` or `named_parameters()`. With a module its buffers are known to
        be constant, which a weight computed from a mask needs.
    reduction: whether the loss is the "mean" or the "sum" over examples. Several backward passes in one
        block are micro-batches of one batch; under "mean" each loss is its share of the mean of all.
    scale: what the loss was multiplied by, as a GradScaler does.
    examples: the number of examples in the batch, where the rows of one example are merged into the
        leading dimension and that cannot be seen from the tensor.
    """
    if reduction not in ("mean", "sum"):
        raise InvalidValue(f"reduction must be 'mean' or 'sum', as the loss is; got {reduction!r}.")
    if not scale > 0:
        raise InvalidValue(
            f"scale must be a positive number, what the loss was multiplied by; got {scale!r}."
        )
    if examples is not None and (not isinstance(examples, int) or examples < 1):
        raise InvalidValue(
            f"examples must be the number of examples in the batch, at least 1; got {examples!r}."
        )
    return watching(watched_parameters(parameters), reduction, scale, examples)


@final
class watching(AbstractContextManager[Statistics]):
    """`capture` for arguments that are known to be good.

    With `stacks`, parameters have many values; `samples` says how many of them are computed at once.
    """

    def __init__(
        self,
        parameters: WatchedParameters,
        reduction: str,
        scale: float = 1.0,
        examples: int | None = None,
        stacks: StackedWeights | None = None,
        samples: int = 1,
    ):
        self._interception = Interception(parameters, examples, stacks, reduction, samples)
        self._statistics = Statistics(self._interception.accumulator, reduction, scale)

    def __enter__(self) -> Statistics:
        if self._interception.accumulator.closed:
            raise CallOrderError(
                "a block has ended and cannot begin again. Call capture anew for each block."
            )
        try:
            self._interception.__enter__()  # type: ignore[no-untyped-call]
            return self._statistics
        except BaseException:  # an interrupt, after which nobody else would leave the mode
            self._interception.withdraw()
            raise

    def __exit__(self, kind: object = None, *_: object) -> None:
        self._interception.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._interception.accumulator.closed = True
        if kind is None:
            self._interception.accumulator.check_shares()

    def __del__(self) -> None:
        interception: Interception | None = getattr(self, "_interception", None)
        if (
            interception is not None and not interception.accumulator.closed
        ):  # an interrupt came before the end could
            interception.withdraw()


def squared_gradients(
    model: torch.nn.Module,
    loss: Callable[[], Tensor],
    reduction: str = "mean",
    *,
    examples: int | None = None,
) -> dict[str, Tensor]:
    """Name → Σᵢ gᵢ² for the loss that `loss()` returns, by the names of `model`; `.grad` is left alone.

    A parameter that the loss does not reach has zeros. `reduction` and `examples` are those of `capture`.
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with capture(model, reduction, examples=examples) as stats:
        value = loss()
        if not isinstance(value, Tensor) or value.numel() != 1:
            got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise InvalidType(
                f"loss must return one number, the {reduction} over examples, as a tensor; got {got}."
            )
        torch.autograd.grad(value.sum(), list(named.values()), allow_unused=True)
    return {
        n: stats.squares[p] if p in stats.squares else torch.zeros_like(widen(p)) for n, p in named.items()
    }
