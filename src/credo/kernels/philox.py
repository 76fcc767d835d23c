"""Gaussian noise from a counter, in plain torch: the reference of `source/gaussian.h`, on any device.

Philox4x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) turns (seed, stream, index, block)
into four words of 32 bits; Box–Muller turns two uniforms into two normals. Words and uniforms are those of the C++ bit
for bit, normals to the last few bits. Numbers come in tiles of 64, and tile t owns the blocks 32t … 32t+31; how the
lanes of a tile share them out is told in `gaussian.h`.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from credo.kernels.scratch import scratch

TILE = 64
LANES = 32  # pairs of numbers in a tile, and blocks that it owns
ROUNDS = 7  # the fewest that pass BigCrush; here every round costs ten operations

_LOW = 0xFFFFFFFF
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85

Words = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class _Precision:
    """How the bits of a lane become an odd number: its last bit marks the middle of a cell, so it is never zero."""

    lane: torch.dtype
    blocks: int  # of a tile
    radius_shift: int
    radius_bits: int
    angle_shift: int  # the angle's last two bits are spoken for
    angle_bits: int


_PRECISION = {
    torch.float32: _Precision(torch.int32, 16, 1, 31, 2, 30),
    torch.float64: _Precision(torch.int64, 32, 11, 53, 11, 53),
}


def words(block: Tensor, index: Tensor, seed: int, stream: int) -> Words:
    """The four words of every block, in the lower halves of int64 that the next call overwrites.

    Products wrap at 64 bits as in C, and a shift brings in copies of the sign; one mask a round removes both.
    """
    x, y, z, w, p, q = (scratch(f"philox {name}", tuple(block.shape), block) for name in "xyzwpq")
    x.copy_(block), y.copy_(index), z.fill_(stream & _LOW), w.fill_(stream >> 32 & _LOW)
    for r in range(ROUNDS):
        torch.mul(x, _MULTIPLIERS[0], out=p), torch.mul(z, _MULTIPLIERS[1], out=q)
        torch.bitwise_right_shift(q, 32, out=x).bitwise_xor_(y).bitwise_xor_(seed + r * _WEYL[0] & _LOW)
        torch.bitwise_right_shift(p, 32, out=z).bitwise_xor_(w).bitwise_xor_(
            (seed >> 32) + r * _WEYL[1] & _LOW
        )
        x.bitwise_and_(_LOW), z.bitwise_and_(_LOW)
        y, w, p, q = q, p, w, y
    return x, y.bitwise_and_(_LOW), z, w.bitwise_and_(_LOW)


def lane_bits(
    tile: Tensor, index: Tensor, seed: int, stream: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The bits behind the radius and the angle of every lane: (tiles, 32) integers as wide as `dtype`."""
    how = _PRECISION[dtype]
    block = (tile * LANES)[:, None] + torch.arange(how.blocks, device=tile.device)  # (tiles, blocks)
    x, y, z, w = words(block, index[:, None], seed, stream)
    if dtype == torch.float64:
        return x.bitwise_or_(y.bitwise_left_shift_(32)), z.bitwise_or_(w.bitwise_left_shift_(32))
    # Two lanes of 32 bits side by side in one int64, as they lie in memory.
    radius, angle = x.bitwise_or_(z.bitwise_left_shift_(32)), y.bitwise_or_(w.bitwise_left_shift_(32))
    return radius.view(how.lane), angle.view(how.lane)


def uniforms(radius: Tensor, angle: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """u in (0, 1] and x in (−π/4, π/4), on grids that are symmetric and miss zero. Changes its arguments."""
    how = _PRECISION[dtype]
    half = 1 << how.angle_bits - 1
    radius.bitwise_right_shift_(how.radius_shift).bitwise_and_((1 << how.radius_bits) - 1).bitwise_or_(1)
    angle.bitwise_right_shift_(how.angle_shift).bitwise_and_(2 * half - 1).bitwise_or_(1).sub_(half)
    u, x = converted("u", radius, dtype), converted("x", angle, dtype)
    return u.mul_(2.0**-how.radius_bits), x.mul_(math.pi / 4 / half)


def converted(name: str, integers: Tensor, dtype: torch.dtype) -> Tensor:
    """The integers as floating-point numbers in scratch memory."""
    return scratch(f"philox {name}", tuple(integers.shape), integers.new_empty(0, dtype=dtype)).copy_(
        integers
    )


def gaussians(tile: Tensor, index: Tensor, seed: int, stream: int, dtype: torch.dtype) -> Tensor:
    """The standard normals of tiles `tile` of tensors `index`: (tiles, 64), in memory that the next call overwrites.

    √(−2 ln u)·(cos θ, sin θ), where the angle's last two bits choose one of the four images of x that make up θ: the
    sign of both numbers, and which of them is the sine. So both are as exact near zero as anywhere.
    """
    radius, angle = lane_bits(tile, index, seed, stream, dtype)
    sign, swapped = (
        converted("sign", angle & 1, dtype).mul_(-2).add_(1),
        converted("swapped", angle >> 1 & 1, dtype),
    )
    u, x = uniforms(radius, angle, dtype)
    r = u.log_().mul_(-2).sqrt_().mul_(sign)
    sine = torch.sin(x, out=sign).mul_(r)
    cosine = x.cos_().mul_(r)
    out = scratch("philox out", (len(tile), TILE), x)
    torch.lerp(cosine, sine, swapped, out=out[:, :LANES])  # exactly the one or the other
    torch.lerp(sine, cosine, swapped, out=out[:, LANES:])
    return out
