"""Programs for Σᵢrᵢ and Σᵢrᵢ², rᵢ an example's own gradient of a weight, which lives in registers only.

A program has a tile of the weight and some of the examples, and writes its share of both sums: shares are added up by
another launch, in an order of its own, so that the same inputs always give the same bits. Half-precision inputs meet
in tensor cores; products, sums and squares are float32.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["examples"])
def sequence_sums(
    x, g, out, examples, places, inputs, outputs, sxm, sxt, sxi, sgm, sgt, sgo,
    PER: tl.constexpr, BO: tl.constexpr, BI: tl.constexpr, BT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """rᵢ[o, n] = Σₜ gᵢ[t, o]·xᵢ[t, n], n over the inputs; out (2, shares, outputs, inputs)."""
    of_inputs = tl.cdiv(inputs, BI)
    o = (tl.program_id(0) // of_inputs) * BO + tl.arange(0, BO)
    i = (tl.program_id(0) % of_inputs) * BI + tl.arange(0, BI)
    share, shares = tl.program_id(1), tl.num_programs(1)
    t = tl.arange(0, BT)
    total, squares = tl.zeros((BO, BI), tl.float32), tl.zeros((BO, BI), tl.float32)
    first = share.to(tl.int64) * PER
    x += first * sxm
    g += first * sgm
    for _ in range(tl.minimum(PER, examples - share * PER)):
        r = tl.zeros((BO, BI), tl.float32)
        for begin in range(0, places, BT):
            at = begin + t
            gt = tl.load(
                g + at[None, :] * sgt + o[:, None] * sgo,
                (o[:, None] < outputs) & (at[None, :] < places),
                other=0.0,
            )
            xt = tl.load(
                x + at[:, None] * sxt + i[None, :] * sxi,
                (i[None, :] < inputs) & (at[:, None] < places),
                other=0.0,
            )
            r = tl.dot(gt, xt, r, input_precision=PRECISION)
        total += r
        squares += r * r
        x += sxm
        g += sgm
    here = share.to(tl.int64) * outputs * inputs
    squared = (shares + share).to(tl.int64) * outputs * inputs
    at = o[:, None] * inputs + i[None, :]
    inside = (o[:, None] < outputs) & (i[None, :] < inputs)
    tl.store(out + here + at, total, inside)
    tl.store(out + squared + at, squares, inside)


@triton.jit(do_not_specialize=["examples"])
def convolution_sums(
    x, g, out, examples, inputs, outputs, height, width, places, columns,
    sxm, sxc, sxh, sxw, sgm, sgo, sgp, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w,
    KH: tl.constexpr, KW: tl.constexpr, LAST: tl.constexpr,
    PER: tl.constexpr, BO: tl.constexpr, BK: tl.constexpr, BP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """rᵢ[o, c, k] = Σₚ gᵢ[o, p]·xᵢ[c, stride·p + dilation·k − padding], of `inputs` and `outputs` channels a group.

    The unfolded input is gathered as it is needed. LAST: channels lie next to one another, so they are gathered
    together. out (2, shares, groups·outputs, inputs·KH·KW).
    """
    K = inputs * KH * KW
    of_columns = tl.cdiv(K, BK)
    o = (tl.program_id(0) // of_columns) * BO + tl.arange(0, BO)
    k = (tl.program_id(0) % of_columns) * BK + tl.arange(0, BK)
    share, shares = tl.program_id(1), tl.num_programs(1)
    group, groups = tl.program_id(2), tl.num_programs(2)
    if LAST:
        c, tap = k % inputs, k // inputs
    else:
        c, tap = k // (KH * KW), k % (KH * KW)
    down, along = (tap // KW) * dilation_h - pad_h, (tap % KW) * dilation_w - pad_w
    channel = (group * inputs + c) * sxc
    row_of_g = (group * outputs + o) * sgo
    p = tl.arange(0, BP)
    total, squares = tl.zeros((BO, BK), tl.float32), tl.zeros((BO, BK), tl.float32)
    first = share.to(tl.int64) * PER
    x += first * sxm
    g += first * sgm
    for _ in range(tl.minimum(PER, examples - share * PER)):
        r = tl.zeros((BO, BK), tl.float32)
        for begin in range(0, places, BP):
            q = begin + p
            here = q < places
            gt = tl.load(
                g + row_of_g[:, None] + q[None, :] * sgp,
                (o[:, None] < outputs) & here[None, :],
                other=0.0,
            )
            row = (q // columns)[:, None] * stride_h + down[None, :]
            column = (q % columns)[:, None] * stride_w + along[None, :]
            seen = here[:, None] & (k[None, :] < K)
            seen = seen & (row >= 0) & (row < height) & (column >= 0) & (column < width)
            xt = tl.load(x + channel[None, :] + row * sxh + column * sxw, seen, other=0.0)
            r = tl.dot(gt, xt, r, input_precision=PRECISION)
        total += r
        squares += r * r
        x += sxm
        g += sgm
    size = groups.to(tl.int64) * outputs * K  # of the weight
    where = (group * outputs + o)[:, None] * K + (c * KH * KW + tap)[None, :]
    inside = (o[:, None] < outputs) & (k[None, :] < K)
    tl.store(out + share * size + where, total, inside)
    tl.store(out + (shares + share) * size + where, squares, inside)
