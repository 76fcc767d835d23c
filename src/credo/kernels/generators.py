"""Gaussian noise from torch's own generator, for training without the C++ kernels: several times as fast as `philox`.

A stretch of noise is cut into blocks, and each has a Mersenne twister whose state is a function of
(seed, stream, index, block) alone. So blocks can be drawn by several Python threads, and how many there are changes no
number. torch takes only 32 bits of a seed, too few for a run of many steps; here a hash fills the state.
"""

import os
import struct
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from hashlib import shake_128
from typing import NamedTuple, final

import torch
from torch import Tensor

from credo.kernels.scratch import scratch

SERIAL = (
    1 << 15
) - 16  # elements on which torch starts no threads of its own: they would be in the way of ours
BLOCK = 2 * SERIAL
ALONE = 1 << 17  # up to here waking other threads takes longer than drawing
WORDS = 624  # of the twister's state, 32 bits each
UNIT = 16  # only of a multiple of so many does a longer draw begin with the numbers of a shorter one

_own = threading.local()

Use = Callable[[int, int, int, Tensor], None]  # of noise for the elements [begin, end) of tensor k


class Piece(NamedTuple):
    """The elements [begin, end) of a tensor, which lie in one block; positions are counted from the tensor's start."""

    tensor: int
    begin: int
    end: int
    before: int  # positions of the block before the first of these elements
    key: bytes


def draw(
    sizes: Sequence[int],
    starts: Sequence[int],
    indices: Sequence[int],
    seed: int,
    stream: int,
    dtype: torch.dtype,
    use: Use,
) -> None:
    """Hands noise for tensors of these sizes, which begin at these positions, to `use`, on several Python threads."""
    pieces = [
        Piece(
            k,
            max(0, block * BLOCK - start),
            min(size, (block + 1) * BLOCK - start),
            max(0, start - block * BLOCK),
            struct.pack("<QQQQ", seed, stream, indices[k], block),
        )
        for k, (size, start) in enumerate(zip(sizes, starts, strict=True))
        if size
        for block in range(start // BLOCK, -(-(start + size) // BLOCK))
    ]
    threads = 1 if sum(sizes) <= ALONE else torch.get_num_threads()
    others = [
        helpers(os.getpid()).submit(draw_here, pieces[k::threads], dtype, use) for k in range(1, threads)
    ]
    draw_here(pieces[::threads], dtype, use)
    for other in others:
        other.result()


@torch.no_grad()
def draw_here(pieces: Sequence[Piece], dtype: torch.dtype, use: Use) -> None:
    """On this thread; `normal_` is serial, but lets other threads run."""
    if not hasattr(_own, "twister"):
        _own.twister = Twister()
    memory = scratch("noise", (BLOCK,), torch.empty(0, dtype=dtype))
    for k, begin, end, before, key in pieces:
        noise = memory[: -(-(before + end - begin) // UNIT) * UNIT].normal_(generator=_own.twister.keyed(key))
        for i in range(begin, end, SERIAL):
            j = min(end, i + SERIAL)
            use(k, i, j, noise[before + i - begin : before + j - begin])


@final
class Twister:
    """A generator whose whole state is a hash of a key.

    All of it, because the twister is slow to spread what differs: a pattern in the state is a correlation in the noise.
    """

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.state = self.generator.get_state()  # torch's own format, in which words take eight bytes each
        self.words = self.state[24 : 24 + WORDS * 8].view(torch.int32).view(-1, 2)[:, 0]

    def keyed(self, key: bytes) -> torch.Generator:
        """The generator, at the beginning of the noise that belongs to a key."""
        self.words.copy_(torch.frombuffer(bytearray(shake_128(key).digest(WORDS * 4)), dtype=torch.int32))
        return self.generator.set_state(self.state)


@cache
def helpers(process: int) -> ThreadPoolExecutor:
    """Threads of this process; after a fork the child has none of them."""
    return ThreadPoolExecutor(max(1, torch.get_num_threads() - 1), thread_name_prefix="credo-noise")
