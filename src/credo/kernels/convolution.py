"""The weight of a convolution: Σᵢrᵢ and Σᵢrᵢ², where example i's own gradient is

    rᵢ[o, c, k] = Σₚ gᵢ[o, p] · xᵢ[c, stride·p + dilation·k − padding]

o output and c input channels, k places in the kernel, p places in the output; one to three spatial dimensions. The
M tensors rᵢ are never in memory together: the C++ kernel has a register tile of one, the twin a few megabytes.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from credo.kernels import native
from credo.kernels.convolution_twin import empty_sums, weight_sums_twin
from credo.kernels.layout import flat_strides, readable, widened
from credo.kernels.linear import row_sums
from credo.kernels.scratch import LIMIT, lend, scratch
from credo.kernels.unfolding import Geometry

__all__ = ["Geometry", "weight_sums", "weight_sums_twin"]


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
    x, g = widened(x, g)
    x, at = visited(x, g, Geometry(kernel_size, stride, padding, dilation, groups))
    if x.numel() == 0 or g.numel() == 0:
        return empty_sums(x, g, at)
    if math.prod(g.shape[2:]) == 1 and groups == 1:
        return one_place_sums(x, g, at)
    kernel = native.kernel(f"convolution_{native.suffix(x.dtype)}") if x.device.type == "cpu" else None
    return weight_sums_twin(x, g, *at) if kernel is None else weight_sums_native(kernel, x, g, at)


def visited(x: Tensor, g: Tensor, at: Geometry) -> tuple[Tensor, Geometry]:
    """A kernel of one tap that strides over most of the input: only the places that it visits, and no stride."""
    if at.taps > 1 or any(at.padding) or max(at.stride) == 1:
        return x, at
    places = [slice(0, stride * size, stride) for stride, size in zip(at.stride, g.shape[2:], strict=True)]
    x = x[(slice(None), slice(None), *places)]
    last = x.dim() == 4 and x.stride(1) == 1
    x = x.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
    return x, at._replace(stride=[1] * len(places))


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


def weight_sums_native(kernel: native.Kernel, x: Tensor, g: Tensor, at: Geometry) -> tuple[Tensor, Tensor]:
    """The C++ kernel; in parts where its copies of x and g would need too much scratch memory."""
    x, g = readable(x), readable(g)
    shape = (g.shape[1], x.shape[1] // at.groups, *at.kernel_size)
    threads = torch.get_num_threads()
    geometry = native.integers(*numbers(x, g, at))
    nothing = native.pointer(None)
    needed = kernel(
        geometry, nothing, nothing, nothing, nothing, nothing, threads
    )  # without scratch it only asks
    if needed > LIMIT and (halves := split(x, g, at)):
        first, second = (weight_sums_native(kernel, *half) for half in halves)
        dim = 0 if at.groups > 1 else 1
        return torch.cat((first[0], second[0]), dim), torch.cat((first[1], second[1]), dim)
    workspace = scratch("convolution", (-(-needed // x.element_size()),), x)
    total, squares = x.new_empty(shape), lend(shape, x)
    kernel(geometry, *map(native.pointer, (x, g, total, squares, workspace)), threads)
    return total, squares


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
