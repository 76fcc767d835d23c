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
NARROWEST, EVEN = 16, 8  # numbers in a line of unfolded input: products of other lengths are slow


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
    """Numbers to which one channel of one example unfolds, at the least."""
    return (x.shape[2] + at.stride[0]) * math.prod(g.shape[3:]) * at.row_taps


def columns_per_example(x: Tensor, g: Tensor, at: Geometry) -> int:
    """Numbers to which one example unfolds."""
    return (x.shape[2] + at.stride[0]) * math.prod(g.shape[3:]) * at.groups * line_length(x, at)


def line_length(x: Tensor, at: Geometry) -> int:
    """How many numbers a line has: what a row of the kernel sees of one group's channels, and some that do not matter.

    A product of (6, 784) and (784, 15) takes two and a half times as long as one with (784, 16), one of (64, 1024) and
    (1024, 9) five times. With many groups there are few rows on the left, and it does not matter.
    """
    seen = at.row_taps * x.shape[1] // at.groups
    if at.groups > 1 or _needs_no_copy(x, at):
        return seen
    return max(NARROWEST, -(-seen // EVEN) * EVEN)


def _needs_no_copy(x: Tensor, at: Geometry) -> bool:
    """Whether the input is its own matrix, as it lies in memory."""
    plain = at.taps == at.groups == 1 and max(at.stride) == 1 and not any(at.padding)
    return plain and x.movedim(1, -1).is_contiguous()


def unfolded(x: Tensor, g: Tensor, at: Geometry, phases: Sequence[int]) -> dict[int, Tensor]:
    """By phase, the lines phase, phase + stride, … of the input: (M·groups, lines·places, `line_length`) each.

    `places` are those of a line of the output; channels lie inside, which matrix products like best.
    """
    length, channels, stride = line_length(x, at), x.shape[1] // at.groups, at.stride[0]
    places, lines = math.prod(g.shape[3:]), -(-x.shape[2] // stride)
    if _needs_no_copy(x, at):
        return {0: x.movedim(1, -1).view(len(x), lines * places, channels)}
    seen_length = at.row_taps * channels
    padded = with_sides(x, at, length - seen_length)
    columns = scratch("columns", (len(phases), len(x), at.groups, lines, *g.shape[3:], length), x)
    for own, phase in zip(columns, phases, strict=True):
        seen = windows(padded[:, phase::stride], g.shape[3:], at)
        own = own[:, :, : seen.shape[1]]
        if _is_one_stretch(at):  # with what follows it, instead of zeros: both meet no one
            own[:, 0] = seen.as_strided(own[:, 0].shape, (*seen.stride()[:3], 1))
        else:
            own[..., seen_length:] = 0
            inside = own[..., :seen_length].view(*own.shape[:-1], *at.kernel_size[1:], channels)
            inside.copy_(seen.view(*seen.shape[:-1], at.groups, channels).movedim(-2, 1))
    flat = columns.view(len(phases), len(x) * at.groups, lines * places, length)
    return dict(zip(phases, flat, strict=True))


def _is_one_stretch(at: Geometry) -> bool:
    """Whether what a row of the kernel sees lies in memory without gaps, in a copy of the input."""
    return at.groups == 1 and len(at.kernel_size) == 2 and at.dilation[1] == 1 and at.row_taps > 1


def with_sides(x: Tensor, at: Geometry, spare: int) -> Tensor:
    """x with its channels last, and with zeros around it along all dimensions but the first; `spare` numbers follow."""
    last, sides = x.movedim(1, -1), at.padding[1:]
    if not any(sides) and (at.row_taps == 1 or (spare == 0 and last.is_contiguous())):
        return last
    sizes = [size + 2 * side for size, side in zip(last.shape[2:-1], sides, strict=True)]
    shape = (*last.shape[:2], *sizes, last.shape[-1])
    number = math.prod(shape)
    padded = inside = scratch("padded", (number + spare,), x)[:number].view(shape)
    for dim, side in enumerate(sides, 2):
        if side:
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
    """A view of (rows, O, `line_length`) with the dimensions of the weight, (O, C, *kernel)."""
    seen = sums[..., : weight[0, :, 0].numel()]
    return seen.view(*seen.shape[:2], *weight.shape[3:], weight.shape[1]).movedim((1, -1), (0, 1))


def accumulators(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Zeros to add to; of a very large weight they are not kept."""
    if math.prod(shape) * like.element_size() > LIMIT // 2:
        return like.new_zeros(shape)
    return scratch("sums", shape, like).zero_()


def grouped(g: Tensor, groups: int) -> Tensor:
    """(M, O, *places) as (M·groups, O / groups, P)."""
    return g.flatten(2).reshape(len(g) * groups, g.shape[1] // groups, -1)
