"""How operations on images take many samples at once: as more channels, side by side.

vmap's own rules are right and slow here: a convolution leaves samples among the channels, pooling moves them
to the batch, which is a copy into a layout where pooling is ten times slower; and biases are added in a pass
of their own. These rules give the same numbers and stay in the layout that convolutions leave.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

Dims: TypeAlias = tuple[int | None, ...]


class _PerChannel(torch.autograd.Function):
    """A function of images that treats every channel by itself."""

    @staticmethod
    def forward(function: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
        return function(images)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(
        info: Any, in_dims: Dims, function: Callable[[Tensor], Tensor], images: Tensor
    ) -> tuple[Tensor, int]:
        return _apart(function(_side_by_side(images, in_dims[1], info.batch_size)), info.batch_size), 1


class _Convolution(torch.autograd.Function):
    """One grouped convolution; or an ordinary one with more outputs, while the images are common to all."""

    @staticmethod
    def forward(
        function: Callable[..., Tensor], images: Tensor, weight: Tensor, bias: Tensor | None, groups: int
    ) -> Tensor:
        return function(images, weight, bias, groups)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(
        info: Any,
        in_dims: Dims,
        function: Callable[..., Tensor],
        images: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        groups: int,
    ) -> tuple[Tensor, int]:
        samples, (_, image_dim, weight_dim, bias_dim, _) = info.batch_size, in_dims
        if image_dim is not None or groups > 1:
            images, groups = _side_by_side(images, image_dim, samples), groups * samples
        weight = _stacked(weight, weight_dim, samples).flatten(0, 1)  # (S·C_out, C_in, kh, kw)
        bias = None if bias is None else _stacked(bias, bias_dim, samples).flatten()
        return _apart(function(images, weight, bias, groups), samples), 1


def _side_by_side(images: Tensor, place: int | None, samples: int) -> Tensor:
    """(M, S·C, H, W): a view of what a convolution left."""
    if place is None:
        return images.repeat(1, samples, 1, 1)
    return images.movedim(place, 1).flatten(1, 2)


def _apart(images: Tensor, samples: int) -> Tensor:
    return images.reshape(len(images), samples, -1, *images.shape[2:])  # (M, S, C, H, W)


def _stacked(tensor: Tensor, place: int | None, samples: int) -> Tensor:
    return tensor.expand(samples, *tensor.shape) if place is None else tensor.movedim(place, 0)


def _pool(func: Callable[..., Any], images: Tensor, *args: Any, **options: Any) -> Any:
    if options.get("return_indices", False):
        return func(images, *args, **options)
    return _PerChannel.apply(lambda x: func(x, *args, **options), images)  # type: ignore[no-untyped-call]


def _convolve(
    func: Callable[..., Tensor],
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    def convolution(x: Tensor, w: Tensor, b: Tensor | None, g: int) -> Tensor:
        return func(x, w, b, stride, padding, dilation, g)

    return _Convolution.apply(convolution, input, weight, bias, groups)  # type: ignore[no-untyped-call]


IMAGE_RULES: dict[Any, Callable[..., Any]] = {
    F.conv2d: _convolve,
    F.max_pool2d: _pool,
    torch.max_pool2d: _pool,
    F.avg_pool2d: _pool,
    F.adaptive_avg_pool2d: _pool,
}
