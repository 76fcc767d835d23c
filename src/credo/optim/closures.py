"""What closures return: one number or the losses of the examples, with or without a backward pass of their own."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from credo.curvature.accumulate import SquareAccumulator
from credo.curvature.many_samples import StackedWeights
from credo.curvature.torch_private import DisableTorchFunction
from credo.errors import CredoError, InvalidType, InvalidValue, UnsupportedOperation
from credo.optim.statistics import Observation


def finish_closure(returned: Any, seen: Observation, reduction: str) -> Tensor:
    """The loss as one detached number; runs the backward pass if the closure left it to the optimiser."""
    if not isinstance(returned, Tensor):
        raise InvalidType(
            f"the closure must return the loss as a tensor, got {type(returned).__name__}: "
            "call loss.backward() in it and return loss, not loss.item()."
        )
    loss = returned
    if seen.examples:  # the closure has called backward
        with DisableTorchFunction():  # a block need not see this
            if loss.numel() == 1:
                return loss.detach() if loss.dim() == 0 else loss.detach().reshape(())
        raise InvalidValue(
            f"the closure called backward and returned a loss of shape {tuple(loss.shape)}, not one number."
        )
    if not loss.requires_grad:
        raise InvalidValue(
            f"the closure did not call backward, and the loss of shape {tuple(loss.shape)} it returned has no graph. "
            "Return losses computed by the model inside the closure."
        )
    return _backward(loss, seen, reduction)


def finish_at_once(stacks: StackedWeights, closure: Callable[[], Tensor], stats: SquareAccumulator) -> Tensor:
    """The mean of the losses of all samples of a step, by one run of the closure."""
    try:
        losses = stacks.vectorised(closure)
        return finish_closure(losses.flatten() if isinstance(losses, Tensor) else losses, stats, "mean")
    except CredoError:
        raise
    except RuntimeError as error:
        raise UnsupportedOperation(
            f"the closure fails under torch.vmap, in which vectorized=True runs it for all samples: {error}. Use "
            "vectorized=False, which runs it for one sample after the other."
        ) from error


def _backward(loss: Tensor, seen: Observation, reduction: str) -> Tensor:
    """One loss an example, or their mean or sum, as the optimiser's `reduction` says."""
    if loss.dim() > 1:
        raise InvalidValue(
            f"the closure must return one loss an example, shape (M,), or one number; got {tuple(loss.shape)}."
        )
    total = loss if loss.dim() == 0 else loss.mean() if reduction == "mean" else loss.sum()
    total.backward()  # type: ignore[no-untyped-call]
    rows = getattr(seen, "rows", seen.examples)
    if loss.dim() == 1 and seen.counted and rows not in (0, len(loss)):
        raise InvalidValue(f"the closure returned {len(loss)} losses for a batch of {rows} examples.")
    return total.detach()
