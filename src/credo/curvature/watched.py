"""The autograd function that takes the place of a watched operation."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunction, _is_any_autocast_enabled

from credo.curvature.operation import Operation, Outputs


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
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        operation: Operation = ctx.operation
        needed = ctx.needs_input_grad[1:]
        if grads[0] is None and all(grad is None for grad in grads):
            return (None,) * (len(needed) + 1)
        ledger = operation.watched_by
        current = ledger.current or ledger.require_pass()
        saved = ctx.saved_tensors  # a checkpoint runs its forward again here, so the block must still see it
        with _plain_torch(saved) if _is_any_autocast_enabled() else DisableTorchFunction():
            if current.single.issuperset(keys := operation.watched_keys) and keys:
                sums = operation.sums(grads, needed, current.examples, saved)
                if sums is not None:
                    ledger.keep(current, keys, sums[1])
                    return None, *sums[0]
            pieces = operation.backward(grads, needed, current.examples, saved)
            return None, *ledger.receive(current, operation.watched_sources, pieces)


# `Watched.apply` without its search of every argument for what functorch may have left in it.
apply_watched: Callable[..., Any] = super(torch.autograd.Function, Watched).apply
# A node asks its class which of two functions is its backward, at every pass; here it is this one.
Watched._backward_cls.apply = Watched.backward  # type: ignore[attr-defined]


def _plain_torch(tensors: tuple[Tensor, ...]) -> AbstractContextManager[Any]:
    """The backward pass is not watched itself, and runs in the dtypes that the forward chose."""
    device = next(tensor for tensor in tensors if tensor is not None).device.type
    return _without_autocast(device) if torch.is_autocast_enabled(device) else DisableTorchFunction()


@contextmanager
def _without_autocast(device: str) -> Iterator[None]:
    with DisableTorchFunction(), torch.autocast(device, enabled=False):
        yield
