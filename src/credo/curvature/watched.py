"""The autograd function that takes the place of a watched operation."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from credo.curvature.ledger import Use
from credo.curvature.operation import Outputs


class Watched(torch.autograd.Function):
    """Runs the operation as torch does; its backward gives Σᵢ rᵢ as the gradient and notes Σᵢ rᵢ².

    It stands in for torch's own node, so autograd never computes the weight gradient a second time.
    """

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """torch's, without its search of every argument for what functorch may have left in it."""
        if torch._C._are_functorch_transforms_active():
            return super().apply(*args)  # type: ignore[no-untyped-call]
        return _apply(*args)

    @staticmethod
    def forward(ctx: Any, use: Use, *tensors: Tensor | None) -> Outputs:
        outputs, extras = use.operation.forward(*tensors)
        ctx.use = use
        ctx.save_for_backward(*tensors, *extras)
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        use: Use = ctx.use
        needed = ctx.needs_input_grad[1:]
        if grads[0] is None and all(grad is None for grad in grads):
            return (None,) * (len(needed) + 1)
        operation, ledger, current = use.operation, use.ledger, use.ledger.require_pass()
        saved = ctx.saved_tensors  # a checkpoint runs its forward again here, so the block must still see it
        with _plain_torch(saved):
            received: list[Any] = [*operation.backward(grads, needed, current.examples, saved)]
            for k in operation.parameter_slots:
                piece = received[k]
                if piece is not None and not isinstance(piece, Tensor):
                    received[k] = ledger.receive(current, use.sources[k], piece)
        return None, *received


_apply = super(torch.autograd.Function, Watched).apply


def _plain_torch(tensors: tuple[Tensor, ...]) -> AbstractContextManager[Any]:
    """The backward pass is not watched itself, and runs in the dtypes that the forward chose."""
    if torch._C._is_any_autocast_enabled():
        device = next(tensor for tensor in tensors if tensor is not None).device.type
        if torch.is_autocast_enabled(device):
            return _without_autocast(device)
    return torch._C.DisableTorchFunction()


@contextmanager
def _without_autocast(device: str) -> Iterator[None]:
    with torch._C.DisableTorchFunction(), torch.autocast(device, enabled=False):
        yield
