"""Convolutions and their transposes, in one to three dimensions, any geometry.

A weight's Σᵢ rᵢ² needs each example's own weight gradient; the kernel forms it a tile at a time and
adds the tile and its square. A transposed convolution is a convolution from its output to its
input, so x and g change places. The bias: rᵢ = Σₚ gᵢₚ over positions p.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from credo.curvature.contribution import Contribution, Factors, Stacked, widen
from credo.curvature.factors import convolution_factors
from credo.curvature.operation import Operation, Outputs, Pieces
from credo.curvature.rules.registry import register_rule
from credo.kernels import convolution as kernel

Size = int | Sequence[int]


class Geometry:
    """Kernel size, stride, padding, dilation and groups, one number a dimension."""

    def __init__(self, weight: Tensor, stride: Size, padding: Size, dilation: Size, groups: int):
        dims = weight.dim() - 2
        self.kernel_size = tuple(weight.shape[2:])
        self.stride, self.padding, self.dilation = (_tuple(v, dims) for v in (stride, padding, dilation))
        self.groups = groups


class ConvolutionShares(Contribution):
    """rᵢ: the gradient of the weight of a convolution from x to where g lives, example by example."""

    def __init__(self, x: Tensor, g: Tensor, geometry: Geometry):
        self.examples = x.shape[0]
        self._x, self._g, self._geometry = widen(x), widen(g), geometry

    def total(self) -> Tensor:
        return self.total_and_squares()[0]

    def total_and_squares(self) -> tuple[Tensor, Tensor]:
        return self._sums(self._x, self._g)

    def per_example(self, start: int, stop: int) -> Tensor:
        xs, gs = self._x[start:stop].split(1), self._g[start:stop].split(1)  # type: ignore[no-untyped-call]
        pairs = zip(xs, gs, strict=True)
        return torch.stack([self._sums(x, g)[0] for x, g in pairs])

    def factors(self, biased: bool, sharing: str) -> Factors:
        at = self._geometry
        padding = [amount for p in reversed(at.padding) for amount in (p, p)]
        x = F.pad(self._x, padding) if any(padding) else self._x
        return convolution_factors(
            x, self._g, at.kernel_size, at.stride, at.dilation, at.groups, biased, sharing
        )

    def _sums(self, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        at = self._geometry
        return kernel.weight_sums(x, g, at.kernel_size, at.stride, at.padding, at.dilation, at.groups)


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
        functions = (torch.conv1d, torch.conv2d, torch.conv3d)
        self._function: Callable[..., Tensor] = functions[weight.dim() - 3]
        self._batched = input.dim() == weight.dim()
        self.count_examples(input)
        if not self._batched:
            self.lead = -1

    def forward(self, *tensors: Tensor | None) -> tuple[Outputs, tuple[Tensor, ...]]:
        return self._function(*tensors, *self.arguments), ()

    def backward(
        self, grads: tuple[Tensor | None, ...], needed: Sequence[bool], examples: int, saved: Sequence[Tensor]
    ) -> Pieces:
        g = grads[0]
        assert g is not None
        x, weight = saved[0].to(g.dtype), saved[1].to(g.dtype)
        stride, padding, dilation, groups = self.arguments
        before, padding = _explicit_padding(padding, weight, dilation)
        x = F.pad(x, before) if any(before) else x
        at = Geometry(weight, stride, padding, dilation, groups)
        gx = _input_gradient(x, g, weight, at) if needed[0] else None
        if gx is not None and any(before):
            gx = F.pad(gx, [-amount for amount in before])
        return (
            gx,
            ConvolutionShares(x, g, at) if needed[1] else None,
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
        self._geometry = Geometry(weight, stride, padding, dilation, groups)
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
        functions = (torch.conv1d, torch.conv2d, torch.conv3d)
        function = functions[weight.dim() - 3]
        gx = function(g, weight, None, at.stride, at.padding, at.dilation, at.groups) if needed[0] else None
        return (
            gx,
            ConvolutionShares(g, x, at) if needed[1] else None,
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


def _explicit_padding(padding: Size | str, weight: Tensor, dilation: Size) -> tuple[list[int], Size]:
    """'same' and 'valid' in numbers: what to pad beforehand (in F.pad's order), and what on both sides.

    An even kernel needs one more zero at the end than at the beginning; torch pads that one first too.
    """
    if not isinstance(padding, str):
        return [], padding
    kernel_size = weight.shape[2:]
    if padding == "valid":
        return [], (0,) * len(kernel_size)
    totals = [d * (k - 1) for d, k in zip(_tuple(dilation, len(kernel_size)), kernel_size, strict=True)]
    extra = [amount for total in reversed(totals) for amount in (0, total % 2)]
    return extra, tuple(total // 2 for total in totals)


def _tuple(value: Size, dims: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * dims if len(values) == 1 else values
