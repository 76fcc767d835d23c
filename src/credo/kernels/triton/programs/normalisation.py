"""Programs for the way back through BatchNorm, in three launches: aᵢ and bᵢ of each example, their sums, gx.

x̂ = (x − mean)·invstd        aᵢ = Σₚ x̂ᵢₚ gᵢₚ        bᵢ = Σₚ gᵢₚ
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["examples", "places"])
def batch_norm_shares(
    x, g, mean, invstd, out, examples, channels, places, sxm, sxc, sxp, sgm, sgc, sgp,
    ACC: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """out (2, examples, channels): aᵢ and bᵢ."""
    m, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BC + tl.arange(0, BC)
    there = c < channels
    middle, scale = tl.load(mean + c, there).to(ACC), tl.load(invstd + c, there).to(ACC)
    p = tl.arange(0, BP)
    a, b = tl.zeros((BC,), ACC), tl.zeros((BC,), ACC)
    for begin in range(0, places, BP):
        at = begin + p
        inside = there[:, None] & (at[None, :] < places)
        gt = tl.load(g + m * sgm + c[:, None] * sgc + at[None, :] * sgp, inside, other=0.0).to(ACC)
        xt = tl.load(x + m * sxm + c[:, None] * sxc + at[None, :] * sxp, inside, other=0.0).to(ACC)
        a += tl.sum((xt - middle[:, None]) * gt, 1)
        b += tl.sum(gt, 1)
    tl.store(out + m * channels + c, a * scale, there)
    tl.store(out + (examples + m) * channels + c, b, there)


@triton.jit(do_not_specialize=["examples"])
def batch_norm_totals(shares, out, examples, channels, ACC: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr):
    """out (4, channels): Σaᵢ, Σaᵢ², Σbᵢ, Σbᵢ²."""
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    there = c < channels
    rows = tl.arange(0, BM)
    a, aa, b, bb = tl.zeros((BC,), ACC), tl.zeros((BC,), ACC), tl.zeros((BC,), ACC), tl.zeros((BC,), ACC)
    for begin in range(0, examples, BM):
        m = begin + rows
        inside = (m[:, None] < examples) & there[None, :]
        of_a = tl.load(shares + m[:, None].to(tl.int64) * channels + c[None, :], inside, other=0.0)
        of_b = tl.load(
            shares + (examples + m)[:, None].to(tl.int64) * channels + c[None, :], inside, other=0.0
        )
        a += tl.sum(of_a, 0)
        aa += tl.sum(of_a * of_a, 0)
        b += tl.sum(of_b, 0)
        bb += tl.sum(of_b * of_b, 0)
    tl.store(out + c, a, there)
    tl.store(out + channels + c, aa, there)
    tl.store(out + 2 * channels + c, b, there)
    tl.store(out + 3 * channels + c, bb, there)


@triton.jit(do_not_specialize=["examples", "places"])
def batch_norm_input(
    x, g, weight, mean, invstd, totals, gx, examples, channels, places,
    sxm, sxc, sxp, sgm, sgc, sgp, som, soc, sop,
    AFFINE: tl.constexpr, TRAINING: tl.constexpr, ACC: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """gx = weight·invstd·(g − Σᵢbᵢ/n − x̂·Σᵢaᵢ/n); in eval mode weight·invstd·g."""
    m, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BC + tl.arange(0, BC)
    at = tl.program_id(2) * BP + tl.arange(0, BP)
    there = c < channels
    inside = there[:, None] & (at[None, :] < places)
    inverse = tl.load(invstd + c, there).to(ACC)
    scale = inverse
    if AFFINE:
        scale = inverse * tl.load(weight + c, there).to(ACC)
    value = tl.load(g + m * sgm + c[:, None] * sgc + at[None, :] * sgp, inside, other=0.0).to(ACC)
    if TRAINING:
        n = (examples * places).to(ACC)
        of_a, of_b = tl.load(totals + c, there) / n, tl.load(totals + 2 * channels + c, there) / n
        middle = tl.load(mean + c, there).to(ACC)
        xt = tl.load(x + m * sxm + c[:, None] * sxc + at[None, :] * sxp, inside, other=0.0).to(ACC)
        value = value - of_b[:, None] - (xt - middle[:, None]) * (inverse * of_a)[:, None]
    tl.store(gx + m * som + c[:, None] * soc + at[None, :] * sop, value * scale[:, None], inside)
