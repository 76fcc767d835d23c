"""Who comes when: pure functions of (seed, epoch, batch), so that a position is all there is to save."""

import hashlib

import torch
from torch import Generator, Tensor


def generator_for(purpose: str, *where: int) -> Generator:
    """A private stream for one purpose at one place; streams of different places are unrelated."""
    label = ":".join([purpose, *map(str, where)]).encode()
    seed = int.from_bytes(hashlib.blake2b(label, digest_size=8).digest(), "little")
    return torch.Generator().manual_seed(seed)


def epoch_order(count: int, shuffle: bool, seed: int, epoch: int) -> Tensor:
    """The positions of all examples in the order of this epoch."""
    if not shuffle:
        return torch.arange(count)
    return torch.randperm(count, generator=generator_for("order", seed, epoch))


def share_of(count: int, rank: int, world: int) -> slice:
    """The rank's part of `count` examples: contiguous, sizes differing by at most one, together all."""
    return slice(count * rank // world, count * (rank + 1) // world)
