"""The weight of a convolution: Σᵢrᵢ and Σᵢrᵢ², where example i's own gradient is

    rᵢ[o, c, k] = Σₚ gᵢ[o, p] · xᵢ[c, stride·p + dilation·k − padding]

o output and c input channels, k places in the kernel, p places in the output; one to three spatial dimensions. The
M tensors rᵢ are never in memory together: the C++ kernel has a register tile of one, plain torch has a few megabytes.
"""

import math
from collections.abc import Iterator, Sequence
from struct import pack

import torch
from torch import Tensor, empty_like

from credo.kernels import accelerator, native
from credo.kernels.convolution_reference import Geometry, empty_sums, weight_sums_reference
from credo.kernels.layout import flat_strides, readable, widened
from credo.kernels.linear import row_sums
from credo.kernels.prepared import Prepared
from credo.kernels.scratch import LIMIT, workspace

__all__ = ["Geometry", "weight_sums", "weight_sums_reference"]


def weight_sums(
    x: Tensor,  # (M, C_in, *S)
    g: Tensor,  # (M, C_out, *S_out)
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> tuple[Tensor, Tensor]:
    """(Σᵢrᵢ, Σᵢrᵢ²), both (C_out, C_in / groups, *kernel_size)."""
    at = Geometry(tuple(kernel_size), tuple(stride), tuple(padding), tuple(dilation), groups)
    return sums_at(x, g, at)


def sums_at(x: Tensor, g: Tensor, at: Geometry) -> tuple[Tensor, Tensor]:
    """`weight_sums` for a geometry all of whose parts are tuples."""
    if plan := _plan(x, g, at):
        return plan(x, g)
    x, g = widened(x, g) if x.is_cpu else (x.detach(), g.detach())
    x, at = visited(x, g, at)
    if x.numel() == 0 or g.numel() == 0:
        return empty_sums(x, g, at)
    if _has_one_place(g, at):
        return one_place_sums(x, g, at)
    if not x.is_cpu:
        return accelerator.run("convolution_sums", x, g, at)  # type: ignore[no-any-return]
    x, g = readable(x), readable(g)
    if plan := _plan(x, g, at):
        return plan(x, g)
    return weight_sums_reference(x, g, at) if _kernel(x) is None else sums_of_halves(x, g, at)


def _has_one_place(g: Tensor, at: Geometry) -> bool:
    return math.prod(g.shape[2:]) == 1 and at.groups == 1


def _kernel(x: Tensor) -> native.Kernel | None:
    return native.kernel(f"convolution_{native.suffix(x.dtype)}") if x.is_cpu else None


def visited(x: Tensor, g: Tensor, at: Geometry) -> tuple[Tensor, Geometry]:
    """A kernel of one tap that strides over most of the input: only the places that it visits, and no stride."""
    if not _skips(at):
        return x, at
    places = [slice(0, stride * size, stride) for stride, size in zip(at.stride, g.shape[2:], strict=True)]
    x = x[(slice(None), slice(None), *places)]
    last = x.dim() == 4 and x.stride(1) == 1
    x = x.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
    return x, at._replace(stride=(1,) * len(places))


def _skips(at: Geometry) -> bool:
    return max(at.stride) > 1 and at.taps == 1 and not any(at.padding)


def one_place_sums(x: Tensor, g: Tensor, at: Geometry) -> tuple[Tensor, Tensor]:
    """With one place in the output rᵢ is an outer product, as in a linear layer; taps in the padding stay zero."""
    total, squares = empty_sums(x, g, at)
    taps, touched = [slice(None), slice(None)], [slice(None), slice(None)]
    for size, kernel, padding, dilation in zip(
        x.shape[2:], at.kernel_size, at.padding, at.dilation, strict=True
    ):
        first = -(-padding // dilation)  # tap k reads place dilation·k − padding
        end = max(first, min(kernel, (size - 1 + padding) // dilation + 1))
        taps.append(slice(first, end))
        touched.append(slice(first * dilation - padding, end * dilation - padding, dilation))
    window = x[tuple(touched)]
    if window.numel():
        for output, part in zip((total, squares), row_sums(window.flatten(1), g.flatten(1)), strict=True):
            output[tuple(taps)] = part.view(output[tuple(taps)].shape)
    return total, squares


class PlannedConvolution:
    """The C++ kernel for inputs and gradients of one size and layout."""

    def __init__(self, kernel: native.Kernel, x: Tensor, g: Tensor, at: Geometry):
        self._kernel, self._threads = kernel, torch.get_num_threads()
        self._geometry = native.integers(*numbers(x, g, at))
        # One number in the shape of the results: empty tensors like others are made faster than by shape.
        self._weight = x.new_empty(()).expand(g.shape[1], x.shape[1] // at.groups, *at.kernel_size)
        # Without memory the kernel only says how much of it it needs.
        self.scratch_bytes = kernel(self._geometry, pack("5P", *[0] * 5), self._threads)
        self._scratch = -(-self.scratch_bytes // x.element_size())

    def __call__(self, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        total, squares = empty_like(self._weight), empty_like(self._weight)
        memory = workspace("convolution", self._scratch, x)
        tensors = pack("5P", x.data_ptr(), g.data_ptr(), total.data_ptr(), squares.data_ptr(), memory)
        self._kernel(self._geometry, tensors, self._threads)
        return total, squares


def _planned(x: Tensor, g: Tensor, at: Geometry) -> PlannedConvolution | None:
    """Where the kernel can take x and g as they are, and needs not too much scratch memory for its copies of them."""
    wide = x.dtype is g.dtype and x.dtype in (torch.float32, torch.float64)
    if not wide or x.numel() == 0 or g.numel() == 0 or _has_one_place(g, at):
        return None
    as_they_are = readable(x) is x and readable(g) is g and not _skips(at)
    if not as_they_are or (kernel := _kernel(x)) is None:
        return None
    plan = PlannedConvolution(kernel, x, g, at)
    return None if plan.scratch_bytes > LIMIT and split(x, g, at) else plan


_prepared = Prepared(_planned)


def _plan(x: Tensor, g: Tensor, at: Geometry) -> PlannedConvolution | None:
    kind = (x.shape, x.stride(), x.dtype, x.is_cpu, g.shape, g.stride(), g.dtype, at)
    return _prepared.get(kind, x, g, at)


def sums_of_halves(x: Tensor, g: Tensor, at: Geometry) -> tuple[Tensor, Tensor]:
    """Where the kernel would need too much scratch memory for the whole."""
    halves = split(x, g, at)
    assert halves is not None
    first, second = (sums_at(*half) for half in halves)
    dim = 0 if at.groups > 1 else 1
    return torch.cat((first[0], second[0]), dim), torch.cat((first[1], second[1]), dim)


Part = tuple[Tensor, Tensor, Geometry]


def split(x: Tensor, g: Tensor, at: Geometry) -> tuple[Part, Part] | None:
    """Two independent halves: of the groups, or of the input channels, or None when there is one channel only."""
    count = at.groups if at.groups > 1 else x.shape[1]
    if count == 1:
        return None
    half = count // 2
    inputs = [half * x.shape[1] // count, x.shape[1] - half * x.shape[1] // count]
    if at.groups == 1:
        first, second = torch.split(x, inputs, 1)
        return (first, g, at), (second, g, at)
    outputs = [half * g.shape[1] // count, g.shape[1] - half * g.shape[1] // count]
    (x0, x1), (g0, g1) = torch.split(x, inputs, 1), torch.split(g, outputs, 1)
    return (x0, g0, at._replace(groups=half)), (x1, g1, at._replace(groups=count - half))


def numbers(x: Tensor, g: Tensor, at: Geometry) -> Iterator[int]:
    """What the C++ side reads as its `Geometry`; a dimension that is missing has one place and one tap."""
    yield from (x.shape[0], x.shape[1], g.shape[1], at.groups)
    missing = 5 - x.dim()
    for sizes in (x.shape[2:], g.shape[2:], at.kernel_size, at.stride):
        yield from (*[1] * missing, *sizes)
    yield from (*[0] * missing, *at.padding, *[1] * missing, *at.dilation)
    yield from (*flat_strides(x), *flat_strides(g))
