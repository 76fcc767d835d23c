"""Many functions at a time: `torch.vmap` over stacked weights, with two rules of our own for images."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from credo.posterior.base import Weights
from credo.posterior.stand_in import StandIn
from credo.predict.inputs import Batch
from credo.predict.outputs import Outputs, Read

POOLS = frozenset(
    {
        F.max_pool2d,
        F.avg_pool2d,
        F.adaptive_avg_pool2d,
        torch.max_pool2d,
        torch.nn.functional._max_pool2d,
    }
)


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
    """Keeps images as (examples, samples·channels, H, W) in channels_last, the layout the convolutions leave.

    vmap's own pooling moves the samples to the batch, a copy into a layout where pooling is ten times slower.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if func in POOLS and args and isinstance(args[0], Tensor) and args[0].dim() == 4:
            if not options.get("return_indices", False):
                return _PerChannel.apply(lambda x: func(x, *args[1:], **options), args[0])
        if func is Tensor.view:
            return _view(args[0], args[1:], options)
        return func(*args, **options)


def _view(tensor: Tensor, shape: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
    """`x.view(len(x), -1)`, as much code flattens images, cannot view channels_last: copy instead.

    Writing through such a view would be lost; the caller compares the answers with the loop's.
    """
    try:
        return tensor.view(*shape, **options)
    except RuntimeError:
        return tensor.contiguous().view(*shape, **options)


class _PerChannel(torch.autograd.Function):
    """A function of images that treats every channel by itself, so that samples can be more channels."""

    @staticmethod
    def forward(function: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:  # type: ignore[override]
        return function(images)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], function: Callable[[Tensor], Tensor], images: Tensor
    ) -> tuple[Tensor, int]:
        place = in_dims[1]
        assert place is not None  # or vmap would not have called this
        together = images.movedim(place, 1).flatten(1, 2)  # (M, S·C, H, W), a view of what a convolution left
        return function(together).unflatten(1, (info.batch_size, -1)), 1
