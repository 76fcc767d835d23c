"""The input of a convolution as matrices: what a row of the kernel sees from each place of the output.

Along the first dimension nothing is unfolded. The rows of a kernel see the same lines of the input, one later than the
other, so what they see are slices of one matrix; a 3×3 kernel copies a third of what it would otherwise. Nor are there
zeros before the first line and after the last: places from where a row sees only those are left out.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from credo.kernels.scratch import LIMIT, scratch

COLUMNS = 8 << 20  # bytes of unfolded input at a time


class Geometry(NamedTuple):
    """How the kernel moves, one number a dimension."""

    kernel_size: Sequence[int]
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int

    @property
    def taps(self) -> int:
        return math.prod(self.kernel_size)

    @property
    def row_taps(self) -> int:
        """Of one row: along all dimensions but the first."""
        return math.prod(self.kernel_size[1:])


class KernelRow(NamedTuple):
    """One place of the kernel along the first dimension, and from where in the output it sees the input."""

    number: int
    first: int  # line of the output
    end: int
    start: int  # what it sees from the first of these: line start·stride + phase of the input
    phase: int


def kernel_rows(x: Tensor, g: Tensor, at: Geometry) -> list[KernelRow]:
    """Those that see anything."""
    stride, found = at.stride[0], []
    for k in range(at.kernel_size[0]):
        shift = k * at.dilation[0] - at.padding[0]
        first, end = max(0, -(shift // stride)), min(g.shape[2], (x.shape[2] - 1 - shift) // stride + 1)
        if first < end:
            found.append(KernelRow(k, first, end, *divmod(first * stride + shift, stride)))
    return found


def columns_per_channel(x: Tensor, g: Tensor, at: Geometry) -> int:
    """Numbers to which one channel of one example unfolds."""
    return (x.shape[2] + at.stride[0]) * math.prod(g.shape[3:]) * at.row_taps


def unfolded(x: Tensor, g: Tensor, at: Geometry, phases: Sequence[int]) -> dict[int, Tensor]:
    """By phase, the lines phase, phase + stride, … of the input: (M·groups, lines·places, row taps·C) each.

    `places` are those of a line of the output; channels lie inside, which matrix products like best.
    """
    padded, channels, stride = with_sides(x, at), x.shape[1] // at.groups, at.stride[0]
    places, lines = math.prod(g.shape[3:]), -(-x.shape[2] // stride)
    if padded.is_contiguous() and at.taps == at.groups == 1 and max(at.stride) == 1:
        return {0: padded.view(len(x), lines * places, channels)}
    shape = (len(phases), len(x), at.groups, lines, *g.shape[3:], *at.kernel_size[1:], channels)
    columns = scratch("columns", shape, x)
    for own, phase in zip(columns, phases, strict=True):
        seen = windows(padded[:, phase::stride], g.shape[3:], at)
        own[:, :, : seen.shape[1]] = seen.view(*seen.shape[:-1], at.groups, channels).movedim(-2, 1)
    flat = columns.view(len(phases), len(x) * at.groups, lines * places, at.row_taps * channels)
    return dict(zip(phases, flat, strict=True))


def with_sides(x: Tensor, at: Geometry) -> Tensor:
    """x with its channels last, and with zeros around it along all dimensions but the first."""
    last, sides = x.movedim(1, -1), at.padding[1:]
    if not any(sides):
        return last.contiguous() if at.row_taps > 1 else last
    sizes = [size + 2 * side for size, side in zip(last.shape[2:-1], sides, strict=True)]
    padded = inside = scratch("padded", (*last.shape[:2], *sizes, last.shape[-1]), x)
    for dim, side in enumerate(sides, 2):
        size = last.shape[dim]
        padded.narrow(dim, 0, side).zero_()
        padded.narrow(dim, size + side, side).zero_()
        inside = inside.narrow(dim, side, size)
    inside.copy_(last)
    return padded


def windows(padded: Tensor, places: Sequence[int], at: Geometry) -> Tensor:
    """A strided view: (M, lines, *places, *row of the kernel, C)."""
    first, line, *spatial, channel = padded.stride()
    steps = [stride * move for stride, move in zip(spatial, at.stride[1:], strict=True)]
    taps = [stride * dilation for stride, dilation in zip(spatial, at.dilation[1:], strict=True)]
    shape = (*padded.shape[:2], *places, *at.kernel_size[1:], padded.shape[-1])
    return padded.as_strided(shape, (first, line, *steps, *taps, channel))


def as_weight(sums: Tensor, weight: Tensor) -> Tensor:
    """A view of (O, rows, row taps·C) with the dimensions of the weight, (O, C, *kernel)."""
    return sums.view(len(weight), *weight.shape[2:], weight.shape[1]).movedim(-1, 1)


def accumulators(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Zeros to add to; of a very large weight they are not kept."""
    if math.prod(shape) * like.element_size() > LIMIT // 2:
        return like.new_zeros(shape)
    return scratch("sums", shape, like).zero_()


def grouped(g: Tensor, groups: int) -> Tensor:
    """(M, O, *places) as (M·groups, O / groups, P)."""
    return g.flatten(2).reshape(len(g) * groups, g.shape[1] // groups, -1)
