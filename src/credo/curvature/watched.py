"""The autograd function that takes the place of a watched operation."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from credo.curvature.ledger import Use
from credo.curvature.operation import Outputs

_NOTHING = nullcontext()


class Watched(torch.autograd.Function):
    """Runs the operation as torch does; its backward gives Σᵢ rᵢ as the gradient and notes Σᵢ rᵢ².

    It stands in for torch's own node, so autograd never computes the weight gradient a second time.
    """

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """torch's, without its search of every argument for what functorch may have left in it."""
        if torch._C._are_functorch_transforms_active():
            return super().apply(*args)  # type: ignore[no-untyped-call]
        return super(torch.autograd.Function, cls).apply(*args)  # type: ignore[misc]

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
        examples = use.ledger.require_pass().examples
        saved = ctx.saved_tensors  # a checkpoint runs its forward again here, so the block must still see it
        with torch._C.DisableTorchFunction(), _no_autocast(saved):
            pieces = use.operation.backward(grads, needed, examples, saved)
            received = [
                piece if piece is None or isinstance(piece, Tensor) else use.ledger.receive(source, piece)
                for source, piece in zip(use.sources, pieces, strict=True)
            ]
        return None, *received


def _no_autocast(tensors: tuple[Tensor, ...]) -> AbstractContextManager[Any]:
    """The backward pass runs in the dtypes that the forward chose."""
    if not torch._C._is_any_autocast_enabled():
        return _NOTHING
    device = next(tensor for tensor in tensors if tensor is not None).device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else _NOTHING
