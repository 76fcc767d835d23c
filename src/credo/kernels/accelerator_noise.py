"""Samples of the weights on an accelerator, in plain torch: numbers of a generator on the device.

The elements of all tensors are one long row, drawn part by part. A part's numbers are a function of the seed, the
stream, the index of the first tensor and the part's number, which the generator is seeded with, and of the kind of the
device: not of the budget. Seeding neither launches anything nor waits.
"""

import math
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from struct import pack
from typing import cast

import torch
from torch import Tensor

from credo.kernels.accelerator import plain, scratch_bytes
from credo.kernels.tensors import Piece, Row, aligned, blocks, cut, flat, numels

PART = 1 << 22  # numbers of a part: a part of what a sample is, so it does not follow the budget


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
    given = cast("Row", shifts) if isinstance(shifts[0], Tensor) else None
    rows: list[Row] = [weights, curvatures, *([given] if given is not None else [])]
    flats = [list(map(flat, row)) for row in rows] if aligned(*rows) else None
    numbers = cast("Sequence[float]", shifts)
    generator = torch.Generator(weights[0].device)
    for block in _blocks(weights, flats is not None, scratch_bytes() if budget is None else budget):
        noise: list[Tensor] = []
        for number, pieces in block:
            generator.manual_seed(key(seed, stream, indices[0], number))
            sizes = [piece.size for piece in pieces]
            row = curvatures[0].new_empty(sum(sizes)).normal_(generator=generator)
            noise += row.split(sizes)  # type: ignore[no-untyped-call]
        pieces = [piece for _, part in block for piece in part]
        own = [cut(row, pieces) for row in flats or rows]
        if flats is None:
            noise = [own.view(weights[piece.tensor].shape) for own, piece in zip(noise, pieces, strict=True)]
        if given is not None:
            precision = torch._foreach_add(own[1], own[2])
        else:
            precision = torch._foreach_add(own[1], [numbers[piece.tensor] for piece in pieces])
        torch._foreach_sqrt_(precision)
        torch._foreach_addcdiv_(
            own[0], noise, precision, [math.sqrt(scales[piece.tensor]) for piece in pieces]
        )


def key(*numbers: int) -> int:
    """A seed for a generator of torch's from numbers below 2⁶⁴."""
    digest = blake2b(pack(f"<{len(numbers)}Q", *numbers), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _blocks(weights: Row, can_cut: bool, budget: int) -> Iterator[list[tuple[int, list[Piece]]]]:
    """The numbered parts of the row of all elements, as many at a time as have room for noise and precision."""
    sizes = numels(weights)
    parts = (
        blocks(sizes, PART, PART)
        if can_cut
        else ([Piece(k, 0, size)] for k, size in enumerate(sizes) if size)
    )
    block: list[tuple[int, list[Piece]]] = []
    used = 0
    for number, pieces in enumerate(parts):
        needed = 2 * sum(piece.size for piece in pieces) * max(weights[0].element_size(), 4)
        if block and used + needed > budget:
            yield block
            block, used = [], 0
        block.append((number, pieces))
        used += needed
    if block:
        yield block


@plain
def perturb(mean: Tensor, variance: Tensor, seed: int, stream: int, index: int, tiny: float) -> None:
    """mean ← mean + √(variance + tiny)·ε and variance ← ε / 2√(variance + tiny), which is ∂z/∂variance."""
    generator = torch.Generator(mean.device)
    generator.manual_seed(key(seed, stream, index))
    sd = variance.add_(tiny).sqrt_()
    epsilon = torch.empty_like(variance).normal_(generator=generator)
    mean.addcmul_(sd, epsilon)
    torch.div(epsilon, sd.mul_(2), out=variance)
