"""Noise for the weights: standard normals, and samples w = μ + ε·σ with σ² = scale / (curvature + shift).

Every number is a function of (seed, stream, index, position) and of nothing else: not of the threads, not of how
a tensor is cut, not of the instruction set but for rounding. `seed` names a run, `stream` one draw of all its
weights (the caller counts, say rank << 48 | draw), `index` a tensor in it; the position is the element's place in
memory, counted from `start` when the tensor is a piece of a longer one. Different keys never share bits, by
construction. The global generators are never touched.

Without the kernels `normal_` still gives the same numbers, at several times the price; `sample_all_`, which training
calls at every step, then takes other numbers of the same distribution on the CPU: those of a `torch.Generator`, whose
whole state is a hash of (seed, stream, index).
"""

import math
from collections.abc import Iterator, Sequence
from ctypes import byref, c_int64
from functools import lru_cache
from hashlib import shake_128
from itertools import chain
from operator import add
from struct import pack, unpack
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, get_num_threads
from torch.autograd.graph import increment_version

from credo.errors import InvalidValue
from credo.kernels import accelerator, philox, tensors
from credo.kernels.scratch import scratch
from credo.kernels.tensors import Backup, MeanBackup, Numbers, Row, TensorList

WINDOW = 2048  # tiles that plain torch draws at once: its intermediate tensors stay in the cache
ELSEWHERE = 1 << 15  # on an accelerator, which likes few large calls
PART = 1 << 19  # numbers that a generator draws at once
STATE_BEGIN, STATE_WORDS = (
    24,
    624,
)  # bytes of `Generator.get_state()` before the Mersenne twister's words, of 64 bits each
LARGEST = 1 << 33  # elements: 2³² blocks of a stream have numbers for so many


Draw = tuple[int, int, int, Tensor]  # tensor, begin, end: noise for its elements [begin, end)


def normal_(out: Tensor, seed: int, stream: int, index: int = 0, start: int = 0) -> None:
    """Fill `out` with standard normals ε."""
    normal_all_([out], seed, stream, [index], [start])


def sample_(
    weight: Tensor,
    curvature: Tensor,
    scale: float,
    shift: float | Tensor,
    seed: int,
    stream: int,
    index: int = 0,
    mean: Tensor | None = None,
) -> None:
    """weight ← mean + ε·√(scale / (curvature + shift)); without a `mean` it is what `weight` holds."""
    shifts = [shift] if isinstance(shift, Tensor) else shift
    means = None if mean is None else [mean]
    sample_all_([weight], [curvature], scale, shifts, seed, stream, [index], means)


@torch.no_grad()
def normal_all_(outs: Row, seed: int, stream: int, indices: Sequence[int], starts: Sequence[int]) -> None:
    """`normal_` for many tensors in one call."""
    _check(outs, seed, stream, indices, starts)
    rows = [out if tensors.is_dense(out) else torch.empty_like(out) for out in outs]
    if call := tensors.call("normal", rows):
        layout = call.sizes + tensors.whole_numbers(*indices, *starts)
        call.kernel(call.addresses, layout, call.length, pack("2Q", seed, stream), _threads())
        increment_version(rows)
    else:
        for k, begin, end, noise in _draws(rows, seed, stream, indices, starts):
            tensors.flat(rows[k])[begin:end] = noise
    _hand_back(rows, outs)


def sample_all_(
    weights: Row,
    curvatures: Row,
    scale: Numbers,
    shift: Numbers | Row,
    seed: int,
    stream: int,
    indices: Sequence[int],
    means: Row | None = None,
    backup: Backup | MeanBackup | None = None,
    offsets: Row | None = None,
    starts: Sequence[int] | None = None,
) -> None:
    """`sample_` for many tensors in one call; `shift` is one number for all, one for each, or a tensor for each.

    `backup` gets the means, or has them already; with `offsets` the samples are around mean + offset. `starts` are
    those of weights that are pieces of longer tensors; a list may know them by itself.
    """
    if starts is None and isinstance(weights, TensorList):
        starts = weights.starts
    one = isinstance(shift, float | int) or (len(shift) > 0 and not isinstance(shift[0], Tensor))
    number, shifts = cast("Numbers", shift if one else 0.0), cast("Row | None", None if one else shift)
    packed = pairs(scale, number, len(indices))
    if isinstance(backup, MeanBackup):
        assert isinstance(weights, TensorList)
        backup = backup.take(weights)
    if backup is not None and backup.done.value:
        means, backup = backup.places, None
    rows = (weights, means or weights, curvatures, shifts)
    call = tensors.call("sample", *rows, None if backup is None else backup.places, offsets)
    layout = None
    if call is not None and 0 <= seed < 1 << 64 and 0 <= stream < 1 << 64:
        layout = _layout(
            call.sizes,
            indices if isinstance(indices, range) else tuple(indices),
            None if starts is None else tuple(starts),
        )
    if call is not None and layout is not None:
        done, threads = None if backup is None else byref(backup.done), c_int64(get_num_threads())
        call.kernel(call.addresses, layout, call.length, pack("2Q", seed, stream), packed, threads, done)
        increment_version(weights)
        return
    begins = [0] * len(weights) if starts is None else starts
    _check(weights, seed, stream, indices, begins)
    with torch.no_grad():
        _sample_otherwise(
            rows, backup, _Numbers(scale, number, seed, stream, indices, begins, starts is not None), offsets
        )


def pairs(scale: Numbers, shift: Numbers, count: int) -> bytes:
    """Scale and shift of each tensor, as the kernels want them."""
    if isinstance(scale, float | int) and isinstance(shift, float | int):
        return pack("2d", scale, shift) * count
    scales = [scale] * count if isinstance(scale, float | int) else scale
    both = zip(scales, [shift] * count if isinstance(shift, float | int) else shift, strict=True)
    return pack(f"{2 * count}d", *chain.from_iterable(both))


@lru_cache(maxsize=256)
def _layout(sizes: bytes, indices: tuple[int, ...] | range, starts: tuple[int, ...] | None) -> bytes | None:
    """Sizes, indices and starts as the kernel wants them; without starts all begin at 0. None if one is too large."""
    count = len(sizes) // 8
    if len(indices) != count or min((0, *indices)) < 0 or max((0, *indices)) >= 1 << 32:
        return None
    begins = [0] * count if starts is None else starts
    if max((0, *map(add, unpack(f"{count}q", sizes), begins))) > LARGEST:
        return None
    return sizes + pack(f"{2 * count}q", *indices, *begins)


class _Numbers(NamedTuple):
    """What the samples of a row of tensors are drawn with, beside the tensors."""

    scale: Numbers
    shift: Numbers  # where it is not a tensor for each
    seed: int
    stream: int
    indices: Sequence[int]
    starts: Sequence[int]
    pieces: bool  # whether there are any


def _sample_otherwise(
    rows: Sequence[Row | None], backup: Backup | None, by: _Numbers, offsets: Row | None
) -> None:
    """Tensors that the kernel cannot take as they are: by copies that it can, or in plain torch."""
    present = [row for row in rows if row is not None]
    if not all(map(tensors.is_on_cpu, present[0])):
        _sample_elsewhere(rows, backup, by, offsets)
        return
    if backup is not None:
        torch._foreach_copy_(list(backup.places), list(present[1]))
        backup.done.value = 1
    if offsets is not None:
        moved = [mean + offset for mean, offset in zip(present[1], offsets, strict=True)]
        present = [present[0], moved, *present[2:]]
    aligned = present if tensors.aligned(*present) else _align(present)
    if backup is None and offsets is None and aligned is present:
        _sample_reference(present, *by[:6])
        return
    weights, means, curvatures, *shifts = aligned
    shift = shifts[0] if shifts else by.shift
    sample_all_(weights, curvatures, by.scale, shift, *by[2:5], means=means, starts=by.starts)
    _hand_back(weights, present[0])


def _sample_elsewhere(
    rows: Sequence[Row | None], backup: Backup | None, by: _Numbers, offsets: Row | None
) -> None:
    """Tensors of which some are on an accelerator, those of each device together."""
    weights, means, curvatures, shifts = rows
    assert weights is not None
    scales, numbers = tensors.each(by.scale, len(weights)), tensors.each(by.shift, len(weights))
    if backup is not None:
        for places in tensors.by_device(weights):
            torch._foreach_copy_([backup.places[k] for k in places], [weights[k].detach() for k in places])
        backup.done.value = 1  # now, since an interrupt may come at any time
    for places in tensors.by_device(weights):
        own, own_means, own_curvatures, own_shifts, own_offsets = (
            None if row is None else [row[k] for k in places]
            for row in (weights, means, curvatures, shifts, offsets)
        )
        assert own is not None
        scale = [scales[k] for k in places]
        shift: Any = own_shifts or [numbers[k] for k in places]
        key = by.seed, by.stream, [by.indices[k] for k in places]
        starts = [by.starts[k] for k in places]
        if not own[0].is_cpu and by.pieces:
            centres = own if own_means is None else own_means
            _sample_pieces(own, centres, own_curvatures or [], (scale, shift), key, starts, own_offsets)
            continue
        if not own[0].is_cpu:
            own_means = own if means is weights else own_means
            accelerator.run("sample", own, own_means, own_curvatures, scale, shift, *key, own_offsets)
            continue
        assert own_curvatures is not None
        sample_all_(own, own_curvatures, scale, shift, *key, own_means, offsets=own_offsets, starts=starts)


def _sample_pieces(
    weights: Row,
    means: Row,
    curvatures: Row,
    widths: tuple[Sequence[float], Any],
    key: tuple[int, int, Sequence[int]],
    starts: Sequence[int],
    offsets: Row | None,
) -> None:
    """Pieces of longer tensors, on one accelerator: noise by its place, whatever the device has of its own."""
    seed, stream, indices = key
    noise = [torch.empty_like(weight, memory_format=torch.contiguous_format) for weight in weights]
    normal_all_(noise, seed, stream, indices, starts)
    for k, (weight, mean, curvature) in enumerate(zip(weights, means, curvatures, strict=True)):
        centre = mean if offsets is None else mean + offsets[k]
        sd = (widths[0][k] / (curvature + widths[1][k])).sqrt()
        weight.copy_(torch.addcmul(centre.to(sd.dtype), noise[k].to(sd.dtype), sd))


def _sample_reference(
    rows: Sequence[Row],
    scale: Numbers,
    shift: Numbers,
    seed: int,
    stream: int,
    indices: Sequence[int],
    starts: Sequence[int],
) -> None:
    """Tensors that are rows of memory alike: tensor by tensor, with the numbers of a generator on the CPU."""
    weights, means, *widths = rows
    if means[0] is not weights[0]:
        torch._foreach_copy_(list(weights), list(means))
    flat_weights, curvatures, *shifts = (tensors.flats(row) for row in (weights, *widths))
    scales, numbers = tensors.each(scale, len(weights)), tensors.each(shift, len(weights))
    for k, weight in enumerate(weights):
        for begin, noise in _generator_draws(weight, seed, stream, indices[k], starts[k]):
            piece = slice(begin, begin + len(noise))
            precision = curvatures[k][piece] + (shifts[0][k][piece] if shifts else numbers[k])
            flat_weights[k][piece].addcdiv_(noise, precision.sqrt_(), value=math.sqrt(scales[k]))


def _generator_draws(
    out: Tensor, seed: int, stream: int, index: int, start: int
) -> Iterator[tuple[int, Tensor]]:
    """(begin, noise) for `out`, a part at a time, one after the other: the same for any number of threads.

    A piece of a longer tensor costs what comes before it too.

    torch seeds its generator with 32 bits only, so all of its state is made from the key.
    """
    generator = torch.Generator()
    digest = shake_128(pack("<3Q", seed, stream, index)).digest(4 * STATE_WORDS)
    words = torch.frombuffer(bytearray(digest), dtype=torch.uint32).to(torch.int64)
    state = generator.get_state()
    state[STATE_BEGIN : STATE_BEGIN + words.nbytes] = words.view(torch.uint8)
    generator.set_state(state)
    end = start + out.numel()
    for begin in range(0, end, PART):
        size, before = min(PART, end - begin), max(start - begin, 0)
        # torch fills sixteen places at a time, and shorter ends otherwise.
        noise = scratch("noise", (-(-size // 16) * 16,), out.new_empty((), dtype=_noise_type(out)))
        noise.normal_(generator=generator)
        if before < size:
            yield begin + before - start, noise[before:size]


def _noise_type(out: Tensor) -> torch.dtype:
    return torch.float64 if out.dtype == torch.float64 else torch.float32


def _draws(
    outs: Row, seed: int, stream: int, indices: Sequence[int], starts: Sequence[int]
) -> Iterator[Draw]:
    """Noise for all elements, in float64 for such tensors and in float32 for all others."""
    kinds = [(_noise_type(out), out.device) for out in outs]
    for dtype, device in dict.fromkeys(kinds):
        spans = [(k, starts[k], outs[k].numel()) for k, kind in enumerate(kinds) if kind == (dtype, device)]
        for window in _windows(spans, WINDOW if device.type == "cpu" else ELSEWHERE):
            tile = torch.cat(
                [torch.arange(first, first + tiles, device=device) for _, first, tiles in window]
            )
            index = torch.cat([torch.full((tiles,), indices[k], device=device) for k, _, tiles in window])
            noise, before = philox.gaussians(tile, index, seed, stream, dtype).flatten(), 0
            for k, first, tiles in window:
                begin = max(0, first * philox.TILE - starts[k])
                end = min(outs[k].numel(), (first + tiles) * philox.TILE - starts[k])
                place = before + (starts[k] + begin) - first * philox.TILE
                yield k, begin, end, noise[place : place + end - begin]
                before += tiles * philox.TILE


def _windows(spans: Sequence[tuple[int, int, int]], most: int) -> Iterator[list[tuple[int, int, int]]]:
    """The tiles of tensors (tensor, start, size), `most` in each list of (tensor, first tile, number of tiles)."""
    window, free = [], most
    for k, start, size in spans:
        tile, last = start // philox.TILE, -(-(start + size) // philox.TILE) if size else 0
        while tile < last:
            window.append((k, tile, min(free, last - tile)))
            tile, free = tile + window[-1][2], free - window[-1][2]
            if free == 0:
                yield window
                window, free = [], most
    if window:
        yield window


def _align(rows: Sequence[Row]) -> list[Row]:
    """Copies where needed: the weights dense, and the elements of the others in the order of their weight's."""
    dense = [weight if tensors.is_dense(weight) else weight.contiguous() for weight in rows[0]]
    others = [
        [tensors.reordered(t, weight) for t, weight in zip(row, dense, strict=True)] for row in rows[1:]
    ]
    return [dense, *others]


def _hand_back(rows: Row, outs: Row) -> None:
    for row, out in zip(rows, outs, strict=True):
        if row is not out:
            out.copy_(row)


def _threads() -> c_int64:
    return c_int64(get_num_threads())


def _check(outs: Row, seed: int, stream: int, indices: Sequence[int], starts: Sequence[int]) -> None:
    if not (0 <= seed < 1 << 64 and 0 <= stream < 1 << 64):
        raise InvalidValue(f"seed={seed} and stream={stream} must lie in [0, 2⁶⁴).")
    alike, ends = len(outs) == len(indices) == len(starts), map(add, starts, tensors.numels(outs))
    if (
        alike
        and min((0, *indices, *starts)) == 0
        and max((0, *indices)) < 1 << 32
        and max((0, *ends)) <= LARGEST
    ):
        return
    for out, index, start in zip(outs, indices, starts, strict=True):
        if not (0 <= index < 1 << 32 and 0 <= start <= LARGEST - out.numel()):
            raise InvalidValue(
                f"index={index} must lie in [0, 2³²), and start={start} + {out.numel()} elements in [0, 2³³]."
            )
