"""Convolutions and their transposes, in one to three dimensions, any geometry.

A weight's Σᵢ rᵢ² needs each example's own weight gradient; the kernel forms it a tile at a time and
adds the tile and its square. A transposed convolution is a convolution from its output to its
input, so x and g change places. The bias: rᵢ = Σₚ gᵢₚ over positions p.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from credo.curvature.factors import convolution_factors
from credo.curvature.rule import Factors, Operation, Outputs, PerExampleGradient, Pieces, Stacked, widen
from credo.curvature.rules.registry import register_rule
from credo.kernels import convolution as kernel
from credo.kernels.convolution import Geometry

Size = int | Sequence[int]
_CONVOLUTIONS: tuple[Callable[..., Tensor], ...] = (torch.conv1d, torch.conv2d, torch.conv3d)


class ConvolutionGradient(PerExampleGradient):
    """rᵢ: the gradient of the weight of a convolution from x to where g lives, example by example."""

    def __init__(self, x: Tensor, g: Tensor, geometry: Geometry):
        self.examples = x.shape[0]
        self._x, self._g, self._geometry = x, g, geometry

    def total(self) -> Tensor:
        return self.total_and_squares()[0]

    def total_and_squares(self) -> tuple[Tensor, Tensor]:
        return kernel.sums_at(self._x, self._g, self._geometry)

    def per_example(self, start: int, stop: int) -> Tensor:
        xs, gs = self._x[start:stop].split(1), self._g[start:stop].split(1)  # type: ignore[no-untyped-call]
        pairs = zip(xs, gs, strict=True)
        return torch.stack([kernel.sums_at(x, g, self._geometry)[0] for x, g in pairs])

    def factors(self, biased: bool, sharing: str) -> Factors:
        at = self._geometry
        padding = [amount for p in reversed(at.padding) for amount in (p, p)]
        x, g = widen(self._x), widen(self._g)
        x = F.pad(x, padding) if any(padding) else x
        return convolution_factors(x, g, at.kernel_size, at.stride, at.dilation, at.groups, biased, sharing)


@register_rule(torch.conv1d, torch.conv2d, torch.conv3d)
class Convolution(Operation):
    parameter_slots = frozenset({1, 2})
    layer = (1, 2)
    name = "convolution"

    def __init__(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Size = 1,
        padding: Size | str = 0,
        dilation: Size = 1,
        groups: int = 1,
    ):
        self.tensors = (input, weight, bias)
        self.arguments = (stride, padding, dilation, groups)
        dims = weight.dim()
        self._function = _CONVOLUTIONS[dims - 3]
        self.count_examples(input)
        if input.dim() != dims:
            self.lead = -1

    def forward(self, *tensors: Tensor | None) -> tuple[Outputs, tuple[Tensor, ...]]:
        return self._function(*tensors, *self.arguments), ()

    def backward(
        self, grads: tuple[Tensor | None, ...], needed: Sequence[bool], examples: int, saved: Sequence[Tensor]
    ) -> Pieces:
        g = grads[0]
        assert g is not None
        x, weight = saved[0], saved[1]
        if x.dtype is not g.dtype or weight.dtype is not g.dtype:
            x, weight = x.to(g.dtype), weight.to(g.dtype)
        before, at = movement(weight.shape, *self.arguments)
        x = F.pad(x, before) if before else x
        gx = _input_gradient(x, g, weight, at) if needed[0] else None
        if gx is not None and before:
            gx = F.pad(gx, [-amount for amount in before])
        return (
            gx,
            ConvolutionGradient(x, g, at) if needed[1] else None,
            Stacked(g.flatten(2).sum(2)) if needed[2] else None,
        )


@register_rule(torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)
class TransposedConvolution(Operation):
    parameter_slots = frozenset({1, 2})
    name = "transposed convolution"

    def __init__(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Size = 1,
        padding: Size = 0,
        output_padding: Size = 0,
        groups: int = 1,
        dilation: Size = 1,
    ):
        self.tensors = (input, weight, bias)
        self._arguments = (stride, padding, output_padding, groups, dilation)
        functions = (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)
        self._function: Callable[..., Tensor] = functions[weight.dim() - 3]
        self._geometry = movement(weight.shape, stride, padding, dilation, groups)[1]
        self.count_examples(input)
        if input.dim() != weight.dim():
            self.lead = -1

    def forward(self, *tensors: Tensor | None) -> tuple[Outputs, tuple[Tensor, ...]]:
        return self._function(*tensors, *self._arguments), ()

    def backward(
        self, grads: tuple[Tensor | None, ...], needed: Sequence[bool], examples: int, saved: Sequence[Tensor]
    ) -> Pieces:
        g = grads[0]
        assert g is not None
        x, weight = saved[0].to(g.dtype), saved[1].to(g.dtype)
        at = self._geometry
        function = _CONVOLUTIONS[weight.dim() - 3]
        gx = function(g, weight, None, at.stride, at.padding, at.dilation, at.groups) if needed[0] else None
        return (
            gx,
            ConvolutionGradient(g, x, at) if needed[1] else None,
            Stacked(g.flatten(2).sum(2)) if needed[2] else None,
        )


_backward = torch.ops.aten.convolution_backward.default  # without a search for the overload at every call


def _input_gradient(x: Tensor, g: Tensor, weight: Tensor, at: Geometry) -> Tensor:
    zeros = [0] * len(at.stride)
    only_input = [True, False, False]
    result: Tensor = _backward(
        g, x, weight, None, at.stride, at.padding, at.dilation, False, zeros, at.groups, only_input
    )[0]
    return result


def movement(
    weight: torch.Size, stride: Size, padding: Size | str, dilation: Size, groups: int
) -> tuple[list[int], Geometry]:
    """What to pad beforehand (in F.pad's order; nothing is an empty list), and how the kernel moves over that."""
    try:
        return _movement(weight[2:], stride, padding, dilation, groups)
    except TypeError:  # lists cannot be looked up
        stride, dilation = _tuple(stride, 1), _tuple(dilation, 1)
        padding = padding if isinstance(padding, str) else _tuple(padding, 1)
        return _movement(weight[2:], stride, padding, dilation, groups)


@lru_cache(256)
def _movement(
    kernel_size: tuple[int, ...], stride: Size, padding: Size | str, dilation: Size, groups: int
) -> tuple[list[int], Geometry]:
    dims = len(kernel_size)
    stride, dilation = _tuple(stride, dims), _tuple(dilation, dims)
    if not isinstance(padding, str):
        return [], Geometry(tuple(kernel_size), stride, _tuple(padding, dims), dilation, groups)
    total = [0 if padding == "valid" else d * (k - 1) for d, k in zip(dilation, kernel_size, strict=True)]
    # An even kernel needs one more zero at the end than at the beginning; torch pads that one first too.
    extra = [amount for size in reversed(total) for amount in (0, size % 2)]
    both_sides = tuple(size // 2 for size in total)
    return extra if any(extra) else [], Geometry(tuple(kernel_size), stride, both_sides, dilation, groups)


def _tuple(value: Size, dims: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * dims if len(values) == 1 else values
