"""Gaussian noise from a counter, in plain torch: the twin of `source/gaussian.h`, on any device.

Philox4x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) turns (seed, stream, index, block)
into four words of 32 bits; Box–Muller turns two uniforms into two normals. Words and uniforms are those of the C++ bit
for bit, normals to the last few bits. Numbers come in tiles of 64, and tile t owns the blocks 32t … 32t+31; how the
lanes of a tile share them out is told in `gaussian.h`.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

TILE = 64
LANES = 32  # pairs of numbers in a tile, and blocks that it owns
ROUNDS = 7  # the fewest that pass BigCrush; here every round costs ten operations

_LOW = 0xFFFFFFFF
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85


@dataclass(frozen=True)
class _Precision:
    """How bits become an odd number: its last bit marks the middle of a cell, so it is never zero."""

    blocks: int  # of a tile
    radius_shift: int
    radius_bits: int
    angle_shift: int  # the angle's last two bits are spoken for
    angle_bits: int


_PRECISION = {torch.float32: _Precision(16, 1, 31, 2, 30), torch.float64: _Precision(32, 11, 53, 11, 53)}


def words(block: Tensor, index: Tensor, seed: int, stream: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four words of every block, as int64 in [0, 2³²). `block` and `index` are int64 in [0, 2³²) too.

    Products wrap at 64 bits as in C, and a shift brings in copies of the sign; one mask a round removes both. Words that
    are still the same for many blocks stay small, and broadcast: it makes the first two rounds cheap.
    """
    x, y = block, index
    z, w = (torch.tensor(half & _LOW, device=block.device) for half in (stream, stream >> 32))
    key = [seed & _LOW, seed >> 32 & _LOW]
    for _ in range(ROUNDS):
        p, q = x * _MULTIPLIERS[0], z * _MULTIPLIERS[1]
        x = ((q >> 32).bitwise_xor_(key[0]) ^ y).bitwise_and_(_LOW)
        z = ((p >> 32).bitwise_xor_(key[1]) ^ w).bitwise_and_(_LOW)
        y, w = q, p
        key = [(k + weyl) & _LOW for k, weyl in zip(key, _WEYL, strict=True)]
    return x, y.bitwise_and_(_LOW), z, w.bitwise_and_(_LOW)


def lane_bits(tile: Tensor, index: Tensor, seed: int, stream: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The bits behind the radius and the angle of every lane: two (tiles, 32) tensors of int64."""
    blocks = torch.arange(_PRECISION[dtype].blocks, device=tile.device)
    x, y, z, w = words((tile * LANES)[:, None] + blocks, index[:, None], seed, stream)  # (tiles, blocks)
    if dtype == torch.float64:
        return x | y << 32, z | w << 32
    return torch.stack((x, z), -1).flatten(1), torch.stack((y, w), -1).flatten(1)


def uniforms(radius: Tensor, angle: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """u in (0, 1] and x in (−π/4, π/4), on grids that are symmetric and miss zero."""
    how = _PRECISION[dtype]
    half = 1 << how.angle_bits - 1
    k = (radius >> how.radius_shift).bitwise_and_((1 << how.radius_bits) - 1).bitwise_or_(1)
    j = (angle >> how.angle_shift).bitwise_and_(2 * half - 1).bitwise_or_(1).sub_(half)
    return k.to(dtype).mul_(2.0**-how.radius_bits), j.to(dtype).mul_(math.pi / 4 / half)


def gaussians(tile: Tensor, index: Tensor, seed: int, stream: int, dtype: torch.dtype) -> Tensor:
    """The standard normals of tiles `tile` of tensors `index`: (tiles, 64).

    √(−2 ln u)·(cos θ, sin θ), where the angle's last two bits choose one of the four images of x that make up θ: the
    sign of both numbers, and which of them is the sine. So both are as exact near zero as anywhere.
    """
    radius, angle = lane_bits(tile, index, seed, stream, dtype)
    u, x = uniforms(radius, angle, dtype)
    sign = (angle & 1).to(dtype).mul_(-2).add_(1)
    r = u.log_().mul_(-2).sqrt_().mul_(sign)
    sine, cosine = x.sin().mul_(r), x.cos_().mul_(r)
    swapped = angle.bitwise_and_(2).bool()
    out = torch.empty(len(tile), TILE, dtype=dtype, device=tile.device)
    torch.where(swapped, sine, cosine, out=out[:, :LANES])
    torch.where(swapped, cosine, sine, out=out[:, LANES:])
    return out
