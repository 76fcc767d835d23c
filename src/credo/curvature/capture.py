"""Exact squared per-example gradients from one ordinary backward pass.

    with credo.capture(model) as stats:
        F.cross_entropy(model(x), y).backward()
    stats.squares[p]      # Σᵢ gᵢ², gᵢ the gradient of example i's own loss

Inside the block every operation on a watched parameter is found by the parameter's identity and
replaced by one that gives the same result, the same gradient, and the sum of squares beside it.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, final

import torch
from torch import Tensor

from credo.curvature.accumulate import Statistics
from credo.curvature.intercept import watching
from credo.curvature.rule import widen
from credo.curvature.tracking import Parameters, watched_parameters
from credo.curvature.uncompiled import uncompiled
from credo.errors import InvalidType, InvalidValue


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
    return _Captured(watching(watched_parameters(parameters), reduction, examples), scale)


@final
class _Captured(AbstractContextManager[Statistics]):
    """A watched block that shows what it has seen as `Statistics`."""

    def __init__(self, block: watching, scale: float):
        self._block: Any = uncompiled(block)
        self._statistics = Statistics(block.accumulator, block.reduction, scale)

    def __enter__(self) -> Statistics:
        self._block.__enter__()
        return self._statistics

    def __exit__(self, kind: object = None, *_: object) -> None:
        self._block.__exit__(kind)


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
