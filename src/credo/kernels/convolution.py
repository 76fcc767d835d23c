"""The weight of a convolution: Σᵢrᵢ and Σᵢrᵢ², where example i's own gradient is

    rᵢ[o, c, k] = Σₚ gᵢ[o, p] · xᵢ[c, stride·p + dilation·k − padding]

o output and c input channels, k places in the kernel, p places in the output; one to three spatial dimensions. The
M tensors rᵢ are never in memory together: the C++ kernel has a register tile of one, the twin a few megabytes.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from credo.kernels import native
from credo.kernels.layout import flat_strides, readable, widened
from credo.kernels.linear import row_sums
from credo.kernels.scratch import LIMIT, scratch

COLUMNS = 8 << 20  # bytes of unfolded input that the twin makes at a time
PRODUCTS = 2 << 20  # bytes of per-example gradients that the twin makes at a time: they stay in the L2 cache


class Geometry(NamedTuple):
    """How the kernel moves, one number a dimension."""

    kernel_size: Sequence[int]
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int


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
    at = Geometry(kernel_size, stride, padding, dilation, groups)
    if x.numel() == 0 or g.numel() == 0:
        return empty_sums(x, g, at)
    if math.prod(g.shape[2:]) == 1 and groups == 1:
        return one_position_sums(x, g, at)
    kernel = native.kernel(f"convolution_{native.suffix(x.dtype)}") if x.device.type == "cpu" else None
    return weight_sums_twin(x, g, *at) if kernel is None else weight_sums_native(kernel, x, g, at)


def empty_sums(x: Tensor, g: Tensor, at: Geometry) -> tuple[Tensor, Tensor]:
    """The outputs, filled with zeros."""
    shape = (g.shape[1], x.shape[1] // at.groups, *at.kernel_size)
    return x.new_zeros(shape), x.new_zeros(shape)


def one_position_sums(x: Tensor, g: Tensor, at: Geometry) -> tuple[Tensor, Tensor]:
    """With one place in the output rᵢ is an outer product, as in a linear layer; taps in the padding stay zero."""
    total, squares = empty_sums(x, g, at)
    taps: list[slice] = [slice(None), slice(None)]
    touched: list[slice] = [slice(None), slice(None)]
    for size, kernel, padding, dilation in zip(x.shape[2:], at.kernel_size, at.padding, at.dilation, strict=True):
        first = -(-padding // dilation)  # tap k reads place dilation·k − padding
        last = min(kernel - 1, (size - 1 + padding) // dilation)
        taps.append(slice(first, max(first, last + 1)))
        touched.append(slice(first * dilation - padding, max(0, last * dilation - padding + 1), dilation))
    window = x[tuple(touched)]
    for output, part in zip((total, squares), row_sums(window.flatten(1), g.flatten(1)), strict=True):
        output[tuple(taps)] = part.view(output[tuple(taps)].shape)
    return total, squares


def weight_sums_native(kernel: native.Kernel, x: Tensor, g: Tensor, at: Geometry) -> tuple[Tensor, Tensor]:
    """The C++ kernel, on two halves of the channels where its packed copies of x and g would be too large."""
    x, g = readable(x), readable(g)
    shape = (g.shape[1], x.shape[1] // at.groups, *at.kernel_size)
    total, squares = x.new_empty(shape), x.new_empty(shape)
    geometry = native.integers(*numbers(x, g, at))
    tensors = [native.pointer(t) for t in (x, g, total, squares)]
    threads = torch.get_num_threads()
    needed = kernel(geometry, *tensors, native.pointer(None), threads)  # without scratch it only says how much
    workspace = scratch("convolution", (-(-needed // x.element_size()),), x)
    kernel(geometry, *tensors, native.pointer(workspace), threads)
    return total, squares


def numbers(x: Tensor, g: Tensor, at: Geometry) -> Iterator[int]:
    """What the C++ side reads as `Geometry`, a list of int64; dimensions that are missing have size 1."""
    missing = 5 - x.dim()
    yield from (x.shape[0], x.shape[1], g.shape[1], at.groups)
    for sizes, fill in (
        (x.shape[2:], 1),
        (g.shape[2:], 1),
        (at.kernel_size, 1),
        (at.stride, 1),
        (at.padding, 0),
        (at.dilation, 1),
    ):
        yield from (*[fill] * missing, *sizes)
    yield from (*flat_strides(x), *flat_strides(g))


def weight_sums_twin(
    x: Tensor,
    g: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> tuple[Tensor, Tensor]:
    """The same sums in pure torch."""
    at = Geometry(kernel_size, stride, padding, dilation, groups)
    total, squares = empty_sums(x, g, at)
    for outputs, channels, inputs, slice_groups in slices(x, g, at):
        sums = batched_sums if takes_batches(total[outputs, channels]) else looped_sums
        sums(x[:, inputs], g[:, outputs], at._replace(groups=slice_groups), total[outputs, channels], squares[outputs, channels])
    return total, squares


def takes_batches(weight: Tensor) -> bool:
    """Whether to multiply many examples at once: always on an accelerator, else where eight of them fit the cache."""
    return weight.device.type != "cpu" or weight.numel() * weight.element_size() * 8 < PRODUCTS


def slices(x: Tensor, g: Tensor, at: Geometry) -> Iterator[tuple[slice, slice, slice, int]]:
    """Independent parts of the weight that need at most COLUMNS bytes an example, as slices: outputs, the weight's
    channels, the input's channels, and the groups that are left. A loop needs groups one by one."""
    inside, outside = x.shape[1] // at.groups, g.shape[1] // at.groups
    unfolded = math.prod(at.kernel_size) * math.prod(g.shape[2:]) * x.element_size()  # bytes for one channel
    if at.groups > 1:
        weight = x.new_empty(()).expand(g.shape[1], inside, *at.kernel_size)
        step = max(1, min(at.groups, COLUMNS // (unfolded * inside))) if takes_batches(weight) else 1
        for i in range(0, at.groups, step):
            n = min(step, at.groups - i)
            yield slice(i * outside, (i + n) * outside), slice(None), slice(i * inside, (i + n) * inside), n
    else:
        step = max(1, COLUMNS // unfolded)
        for c in range(0, inside, step):
            part = slice(c, c + step)
            yield slice(None), part, part, 1


def batched_sums(x: Tensor, g: Tensor, at: Geometry, total: Tensor, squares: Tensor) -> None:
    """Unfold some examples, multiply them in one bmm, reduce twice."""
    taps, places, weights = math.prod(at.kernel_size), math.prod(g.shape[2:]), total.numel()
    unfolded, inside = x.shape[1] * taps * places, total[0].numel()
    step = max(1, min(COLUMNS // unfolded, PRODUCTS // weights) // x.element_size())
    for part, grads in zip(x.split(step), g.split(step), strict=True):
        m = len(part)
        columns = scratch("columns", (m, x.shape[1], *at.kernel_size, *g.shape[2:]), x)
        columns.copy_(windows(F.pad(part, both_sides(at.padding)), 2, g.shape[2:], at))
        columns = columns.view(m * at.groups, inside, places)
        own = scratch("products", (m * at.groups, len(total) // at.groups, inside), x)
        torch.bmm(grads.reshape(m * at.groups, -1, places), columns.mT, out=own)  # rᵢ
        own = own.view(m, *total.shape)
        total.add_(own.sum(0))
        squares.add_(own.square_().sum(0))


def looped_sums(x: Tensor, g: Tensor, at: Geometry, total: Tensor, squares: Tensor) -> None:
    """Unfold some examples, channels last; then one example and one tile of the weight at a time."""
    taps, places = math.prod(at.kernel_size), math.prod(g.shape[2:])
    inside = x.shape[1] * taps
    sums = x.new_zeros(2, len(total), inside)  # with taps before channels
    step = max(1, COLUMNS // (inside * places * x.element_size()))
    rows = max(1, PRODUCTS // (inside * x.element_size()))
    for part, grads in zip(x.split(step), g.split(step), strict=True):
        columns = scratch("columns", (len(part), *g.shape[2:], *at.kernel_size, x.shape[1]), x)
        padded = F.pad(part.movedim(1, -1), (0, 0, *both_sides(at.padding))).contiguous()
        columns.copy_(windows(padded, 1, g.shape[2:], at))
        columns = columns.view(len(part), places, inside)
        for tile_rows, tile_total, tile_squares in zip(grads.flatten(2).split(rows, 1), *(s.split(rows) for s in sums), strict=True):
            tile = scratch("products", (tile_rows.shape[1], inside), x)
            for i in range(len(part)):
                torch.mm(tile_rows[i], columns[i], out=tile)  # rᵢ
                tile_total.add_(tile)
                tile_squares.addcmul_(tile, tile)
    for output, summed in zip((total, squares), sums, strict=True):
        output.copy_(summed.view(len(total), *at.kernel_size, x.shape[1]).movedim(-1, 1))


def windows(padded: Tensor, first: int, places: Sequence[int], at: Geometry) -> Tensor:
    """A strided view, nothing copied: (M, C, *kernel, *places), or (M, *places, *kernel, C) when `first` is 1."""
    dims = len(places)
    spatial = padded.stride()[first : first + dims]
    taps = [stride * dilation for stride, dilation in zip(spatial, at.dilation, strict=True)]
    steps = [stride * move for stride, move in zip(spatial, at.stride, strict=True)]
    if first == 2:
        shape, strides = (*padded.shape[:2], *at.kernel_size, *places), (*padded.stride()[:2], *taps, *steps)
    else:
        shape, strides = (len(padded), *places, *at.kernel_size, padded.shape[-1]), (padded.stride(0), *steps, *taps, padded.stride(-1))
    return padded.as_strided(shape, strides)


def both_sides(padding: Sequence[int]) -> tuple[int, ...]:
    """As F.pad wants it: from the last dimension to the first, before and after."""
    return tuple(p for size in reversed(padding) for p in (size, size))
