"""Samples of the weights on an accelerator, in plain torch: numbers of a generator on the device.

Each tensor's numbers are a function of (seed, stream, index), which the generator is seeded with: of nothing else but
the kind of the device. Seeding one neither launches anything nor waits.
"""

import math
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from struct import pack
from typing import cast

import torch
from torch import Tensor

from credo.kernels.accelerator import plain, scratch_bytes
from credo.kernels.tensors import Row, aligned, flat

PART = 1 << 22  # numbers that are drawn at once: part of what a sample is, so it is no matter of memory


@plain
def sample(
    weights: Row,
    means: Row,  # `weights` itself, or where the means are
    curvatures: Row,
    scales: Sequence[float],
    shifts: Sequence[float] | Row,
    seed: int,
    stream: int,
    indices: Sequence[int],
    offsets: Row | None = None,
    budget: int | None = None,
) -> None:
    """weight ← mean (+ offset) + ε·√(scale / (curvature + shift)), of tensors on one device."""
    elsewhere = means is not weights
    weights = [weight.detach() for weight in weights]
    if elsewhere:
        torch._foreach_copy_(weights, list(means))
    if offsets is not None:
        torch._foreach_add_(weights, list(offsets))
    generator = torch.Generator(weights[0].device)
    given = cast("Row", shifts) if isinstance(shifts[0], Tensor) else None
    rows: list[Row] = [weights, curvatures, *([given] if given is not None else [])]
    flats = [list(map(flat, row)) for row in rows] if aligned(*rows) else None
    for pieces in _blocks(weights, flats is not None, scratch_bytes() if budget is None else budget):
        whole = flats or rows
        own = [[_part(row[k], begin, end, flats is not None) for k, begin, end in pieces] for row in whole]
        noise = []
        for (k, begin, _), piece in zip(pieces, own[1], strict=True):
            if not begin:
                generator.manual_seed(key(seed, stream, indices[k]))
            noise.append(torch.empty_like(piece).normal_(generator=generator))
        if given is not None:
            precision = torch._foreach_add(own[1], own[2])
        else:
            numbers = cast("Sequence[float]", shifts)
            precision = torch._foreach_add(own[1], [numbers[k] for k, *_ in pieces])
        torch._foreach_sqrt_(precision)
        torch._foreach_addcdiv_(own[0], noise, precision, [math.sqrt(scales[k]) for k, *_ in pieces])


def key(*numbers: int) -> int:
    """A seed for a generator of torch's from numbers below 2⁶⁴."""
    digest = blake2b(pack(f"<{len(numbers)}Q", *numbers), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _blocks(weights: Row, can_cut: bool, budget: int) -> Iterator[list[tuple[int, int, int]]]:
    """Pieces (tensor, begin, end) in order, as many at a time as have room for noise and precision."""
    block: list[tuple[int, int, int]] = []
    used = 0
    for k, weight in enumerate(weights):
        size = weight.numel()
        length = PART if can_cut else max(size, 1)
        for begin in range(0, size, length):
            end = min(size, begin + length)
            needed = 2 * (end - begin) * max(weight.element_size(), 4)
            if block and used + needed > budget:
                yield block
                block, used = [], 0
            block.append((k, begin, end))
            used += needed
    if block:
        yield block


def _part(tensor: Tensor, begin: int, end: int, flat: bool) -> Tensor:
    return tensor[begin:end] if flat and end - begin != tensor.numel() else tensor


@plain
def perturb(mean: Tensor, variance: Tensor, seed: int, stream: int, index: int, tiny: float) -> None:
    """mean ← mean + √(variance + tiny)·ε and variance ← ε / 2√(variance + tiny), which is ∂z/∂variance."""
    generator = torch.Generator(mean.device)
    generator.manual_seed(key(seed, stream, index))
    sd = variance.add_(tiny).sqrt_()
    epsilon = torch.empty_like(variance).normal_(generator=generator)
    mean.addcmul_(sd, epsilon)
    torch.div(epsilon, sd.mul_(2), out=variance)
