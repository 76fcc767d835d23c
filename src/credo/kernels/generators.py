"""Gaussian noise from torch's own generator, for training without the C++ kernels: several times as fast as `philox`.

A stretch of noise is cut into blocks, and each has a Mersenne twister whose state is a function of
(seed, stream, index, block) alone. So blocks can be drawn by several Python threads, and how many there are changes no
number. torch takes only 32 bits of a seed, too few for a run of many steps; here a hash fills the state.
"""

import os
import struct
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from hashlib import shake_128
from typing import final

import torch
from torch import Tensor

from credo.kernels.scratch import scratch

BLOCK = 1 << 16
WINDOW = 1 << 20  # numbers drawn at once: they stay in the cache until they are used
ALONE = 1 << 17  # up to here waking other threads takes longer than drawing
WORDS = 624  # of the twister's state, 32 bits each
UNIT = 16  # only of a multiple of so many does a longer draw begin with the numbers of a shorter one

_own = threading.local()

Draw = tuple[int, int, int, Tensor]  # tensor, begin, end: noise for its elements [begin, end)
Job = tuple[Tensor, bytes]  # noise to fill, and the key of its generator


def draws(
    sizes: Sequence[int],
    starts: Sequence[int],
    indices: Sequence[int],
    seed: int,
    stream: int,
    dtype: torch.dtype,
) -> Iterator[Draw]:
    """Noise on the CPU for tensors of these sizes that begin at these positions; the next item overwrites the last."""
    pieces = [
        (k, block, max(start, block * BLOCK), min(start + size, (block + 1) * BLOCK))
        for k, (size, start) in enumerate(zip(sizes, starts, strict=True))
        for block in range(start // BLOCK, -(-(start + size) // BLOCK))
    ]
    per_window = WINDOW // BLOCK
    for i in range(0, len(pieces), per_window):
        window = pieces[i : i + per_window]
        memory = scratch("noise", (sum(drawn(piece) for piece in window),), torch.empty(0, dtype=dtype))
        rows = memory.split([drawn(piece) for piece in window])
        fill(
            [
                (row, key(seed, stream, indices[k], block))
                for row, (k, block, _, _) in zip(rows, window, strict=True)
            ]
        )
        for row, (k, block, begin, end) in zip(rows, window, strict=True):
            yield k, begin - starts[k], end - starts[k], row[begin - block * BLOCK : end - block * BLOCK]


def drawn(piece: tuple[int, int, int, int]) -> int:
    """How many numbers of a block are drawn to have those of a piece."""
    _, block, _, end = piece
    return -(-(end - block * BLOCK) // UNIT) * UNIT


def key(seed: int, stream: int, index: int, block: int) -> bytes:
    return struct.pack("<QQQQ", seed, stream, index, block)


def fill(jobs: Sequence[Job]) -> None:
    """Draws for all jobs, on as many Python threads as torch has: `normal_` is serial, but lets other threads run."""
    threads = torch.get_num_threads()
    if sum(row.numel() for row, _ in jobs) <= ALONE:
        threads = 1
    others = [helpers(os.getpid()).submit(draw, jobs[k::threads]) for k in range(1, threads)]
    draw(jobs[::threads])
    for other in others:
        other.result()


def draw(jobs: Sequence[Job]) -> None:
    """Draws on this thread."""
    if not hasattr(_own, "twister"):
        _own.twister = Twister()
    for row, own in jobs:
        row.normal_(generator=_own.twister.keyed(own))


@final
class Twister:
    """A generator whose whole state is a hash of a key.

    All of it, because the twister is slow to spread what differs: a pattern in the state is a correlation in the noise.
    """

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.state = self.generator.get_state()  # torch's own format, in which words take eight bytes each
        self.words = self.state[24 : 24 + WORDS * 8].view(torch.int32).view(-1, 2)[:, 0]

    def keyed(self, own: bytes) -> torch.Generator:
        """The generator, at the beginning of the noise that belongs to a key."""
        self.words.copy_(torch.frombuffer(bytearray(shake_128(own).digest(WORDS * 4)), dtype=torch.int32))
        return self.generator.set_state(self.state)


@cache
def helpers(process: int) -> ThreadPoolExecutor:
    """Threads of this process; after a fork the child has none of them."""
    return ThreadPoolExecutor(max(1, torch.get_num_threads() - 1), thread_name_prefix="credo-noise")
