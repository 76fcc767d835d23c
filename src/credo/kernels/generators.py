"""Gaussian noise from torch's own generator, for training without the C++ kernels: several times as fast as `philox`.

The tensors that are drawn together are a row, one after the other. It is cut into blocks, and each has a Mersenne
twister whose state is a function of (seed, stream, index, block) alone, so that a block of many small tensors is one
draw. Blocks can be drawn by several Python threads, and how many there are changes no number. torch takes only 32
bits of a seed, too few for a run of many steps; here a hash fills the state.
"""

import os
import struct
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import cache
from hashlib import shake_128
from typing import final

import torch
from torch import Tensor

from credo.kernels.lists import Piece, blocks
from credo.kernels.scratch import scratch

SERIAL = (
    1 << 15
) - 16  # elements on which torch starts no threads of its own: they would be in the way of ours
BLOCK = 2 * SERIAL
ALONE = 1 << 17  # up to here waking other threads takes longer than drawing
WORDS = 624  # of the twister's state, 32 bits each

_own = threading.local()


Use = Callable[[Sequence[Piece], list[Tensor]], None]  # of noise for pieces


def draw(sizes: Sequence[int], seed: int, stream: int, index: int, dtype: torch.dtype, use: Use) -> None:
    """Hands noise for a row of tensors to `use`, piece by piece, on several Python threads."""
    keyed = [
        (struct.pack("<QQQQ", seed, stream, index, number), pieces)
        for number, pieces in enumerate(blocks(sizes, BLOCK, SERIAL))
    ]
    threads = 1 if sum(sizes) <= ALONE else torch.get_num_threads()
    others = [
        helpers(os.getpid()).submit(draw_here, keyed[k::threads], dtype, use) for k in range(1, threads)
    ]
    draw_here(keyed[::threads], dtype, use)
    for other in others:
        other.result()


def each(draw_one: Callable[[int], None], count: int, size: int) -> None:
    """Calls draw_one(k) for rows of `size` elements; rows that `draw` leaves to one thread, on several."""
    threads = min(count, torch.get_num_threads()) if size <= ALONE < size * count else 1

    def some(first: int) -> None:
        for k in range(first, count, threads):
            draw_one(k)

    others = [helpers(os.getpid()).submit(copy_context().run, some, k) for k in range(1, threads)]
    some(0)
    for other in others:
        other.result()


@torch.no_grad()
def draw_here(keyed: Sequence[tuple[bytes, Sequence[Piece]]], dtype: torch.dtype, use: Use) -> None:
    """On this thread; `normal_` is serial, but lets other threads run."""
    if not hasattr(_own, "twister"):
        _own.twister = Twister()
    memory = scratch("noise", (BLOCK,), torch.empty(0, dtype=dtype))
    for key, pieces in keyed:
        sizes = [piece.size for piece in pieces]
        noise = memory[: sum(sizes)].normal_(generator=_own.twister.keyed(key))
        use(pieces, list(torch.split(noise, sizes)))


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
