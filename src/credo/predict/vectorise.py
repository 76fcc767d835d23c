"""Many functions at a time: `torch.vmap` over stacked weights, with rules of our own for images."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from credo.posterior.base import Weights
from credo.posterior.stand_in import StandIn
from credo.predict.image_rules import IMAGE_RULES
from credo.predict.inputs import Batch
from credo.predict.outputs import Outputs, Read


def run_together(
    stand_in: StandIn, weights: Weights, batch: Batch, read: Read, channels_last: bool
) -> Outputs:
    """Rows of answers, one per function; raises whatever vmap raises when it cannot."""

    def one(sample: Weights) -> Outputs:
        stand_in.load(sample)
        return read(batch.call(stand_in.module))

    if not channels_last:
        return _vmapped(one, weights)
    batch = batch.map(lambda t: t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t)
    with SamplesAsChannels():
        return _vmapped(one, weights)


def _vmapped(one: Callable[[Weights], Outputs], weights: Weights) -> Outputs:
    outputs: Outputs = torch.vmap(one, randomness="error")(weights)
    return outputs


class SamplesAsChannels(TorchFunctionMode):
    """Images stay (examples, samples·channels, H, W) in channels_last from one operation to the next."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if func in IMAGE_RULES and args and isinstance(args[0], Tensor) and args[0].dim() == 4:
            return IMAGE_RULES[func](func, *args, **options)
        if func is Tensor.view:
            return _view(args[0], args[1:], options)
        return func(*args, **options)


def _view(tensor: Tensor, shape: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
    """`x.view(len(x), -1)`, as much code flattens images, cannot view channels_last: copy instead.

    What is written through such a view is lost; the caller compares the answers with the plain loop's.
    """
    try:
        return tensor.view(*shape, **options)
    except RuntimeError:
        return tensor.contiguous().view(*shape, **options)
