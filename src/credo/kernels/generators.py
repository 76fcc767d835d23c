"""Gaussian noise for training without the C++ kernels: other numbers than `philox` has, at a fifth of its price.

The tensors that are drawn together are a row, one after the other. It is cut into blocks, and each has a generator of
its own, numpy's SFC64, whose whole state is a hash of (seed, stream, index, block). From its bits torch makes pairs of
normals, many at a time and on all its threads, by Box and Muller's method:

    √(−2 log u) · (cos θ, sin θ)        u uniform in (0, 1], θ on the circle

θ has half as many bits as u. It is enough: over n equally spaced angles every moment of degree below n is exact.
"""

import math
import threading
from collections.abc import Iterator, Sequence
from functools import lru_cache
from hashlib import blake2b
from struct import pack
from typing import final

import torch
from numpy import frombuffer
from numpy.random import SFC64
from torch import Tensor

from credo.kernels.tensors import Piece, blocks

BLOCK = 1 << 19  # elements: of fewer, starting threads for every operation would take a good part of the time
AHEAD = 1 << 19  # elements that are drawn at once for a row of one block, under following streams
STREAMS = 32  # of them: each takes a generator, and calls that 32 share cost nothing any more
ROWS = 8  # of which noise may lie ready
_BITS = {torch.float32: (torch.int32, torch.int16), torch.float64: (torch.int64, torch.int32)}  # of u, of θ

Noise = tuple[Tensor, ...]
Block = tuple[Sequence[Piece], Noise]  # pieces of the tensors, and noise for each


def draw(sizes: Sequence[int], seed: int, stream: int, index: int, dtype: torch.dtype) -> Iterator[Block]:
    """Noise for a row of tensors, block by block. It is not to be written to."""
    row = _blocks(tuple(sizes))
    if len(row) == 1:
        yield row[0], _own.supply(row[0], seed, index, dtype).noise(stream)
        return
    for number, pieces in enumerate(row):
        yield pieces, normals(pieces, [pack("<4Q", seed, stream, index, number)], dtype)[0]


@lru_cache
def _blocks(sizes: tuple[int, ...]) -> list[tuple[Piece, ...]]:
    return [tuple(pieces) for pieces in blocks(sizes, BLOCK, BLOCK)]


@final
class Supply:
    """The noise of a row of one block.

    Where its streams follow each other, as those of training do, several are drawn at once: on a small network calls
    take longer than numbers. The numbers are the same.
    """

    def __init__(self, pieces: Sequence[Piece], seed: int, index: int, dtype: torch.dtype):
        self._pieces, self._seed, self._index, self._dtype = pieces, seed, index, dtype
        self._together = max(1, min(STREAMS, AHEAD // sum(piece.size for piece in pieces)))
        self._noises: dict[int, Noise] = {}  # by their streams
        self._last = -2  # so that no stream follows it

    def noise(self, stream: int) -> Noise:
        if stream not in self._noises:
            number = self._together if stream == self._last + 1 else 1
            streams = range(stream, min(stream + number, 1 << 64))
            keys = [pack("<4Q", self._seed, own, self._index, 0) for own in streams]
            self._noises = dict(zip(streams, normals(self._pieces, keys, self._dtype), strict=True))
        self._last = stream
        return self._noises[stream]


class _Own(threading.local):
    """What each Python thread has to itself."""

    def __init__(self) -> None:
        self.generator = SFC64(0)
        self._supplies: dict[tuple[object, ...], Supply] = {}

    def supply(self, pieces: tuple[Piece, ...], seed: int, index: int, dtype: torch.dtype) -> Supply:
        key = (pieces, seed, index, dtype)
        found = self._supplies.pop(key, None) or Supply(*key)
        self._supplies[key] = found  # now the last; the first is the one that was not asked for the longest
        if len(self._supplies) > ROWS:
            del self._supplies[next(iter(self._supplies))]
        return found


_own = _Own()


def normals(pieces: Sequence[Piece], keys: Sequence[bytes], dtype: torch.dtype) -> list[Noise]:
    """Standard normals for pieces that lie side by side, for each key its own."""
    sizes = [piece.size for piece in pieces]
    pairs = -(-sum(sizes) // 8) * 4  # whole words of 64 bits
    both, of_u = torch.empty((len(keys), 2, pairs), dtype=dtype, device="cpu"), pairs * dtype.itemsize
    for own, key in zip(both, keys, strict=True):
        bits = random_bytes(of_u * 3 // 2, key)
        own[0].copy_(bits[:of_u].view(_BITS[dtype][0]))
        own[1].copy_(bits[of_u:].view(_BITS[dtype][1]))
    box_muller_(both[:, 0], both[:, 1], 2.0 ** (1 - 8 * dtype.itemsize))
    return [own.view(-1)[: sum(sizes)].split_with_sizes(sizes) for own in both]


def box_muller_(u: Tensor, angle: Tensor, unit: float) -> None:
    """From signed integers, of which |u| · unit is in [0, 1] and an angle has half as many bits."""
    # The square takes the sign away, and −2 log u is −log u². A zero stands for a quarter of a unit.
    torch.addcmul(u.new_tensor(unit**2 / 16), u, u, value=unit**2, out=u)
    radius = u.log_().neg_().sqrt_()
    cosine = torch.cos(angle.mul_(math.pi * math.sqrt(2 * unit)))
    angle.sin_().mul_(radius)
    radius.mul_(cosine)


def random_bytes(size: int, key: bytes) -> Tensor:
    """A multiple of eight, from the generator that belongs to a key."""
    state = frombuffer(blake2b(key, digest_size=32).digest(), "<u8")
    _own.generator.state |= {"state": {"state": state}}
    return torch.from_numpy(_own.generator.random_raw(size // 8)).view(torch.uint8)
