"""Programs that go through a list of tensors in one launch: noise, samples, updates, the check for finite numbers.

All of a list stands in one table of int64, a column for each tensor: the first block, the number of elements, then
what the program needs (the index of its noise), then the addresses, row after row. Numbers stand in a table of
float64. So seeds, steps and addresses never make a new program.

Where a function depends on the type it does so by `x if … else y`: Triton also compiles what stands after
`if …: return x`, and refuses `div_rn` and `sqrt_rn` of float64 there.
"""

import triton
import triton.language as tl


@triton.jit
def _tensor(table, count, TENSORS: tl.constexpr):
    """Which tensor the block of this program is in, and which block of it this is."""
    here = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, TENSORS)
    first = tl.load(table + k, k < count, other=0x7FFFFFFFFFFFFFFF)
    which = tl.sum((first <= here).to(tl.int32), 0) - 1
    return which, here - tl.load(table + which)


@triton.jit
def _row(table, count, row, which, T: tl.constexpr, ALIGNED: tl.constexpr):
    """The address of a tensor in a row of the table; 16 bytes divide it where they divide all of them."""
    place = tl.load(table + row * count + which).to(tl.pointer_type(T))
    return tl.multiple_of(place, 16) if ALIGNED else place


@triton.jit
def _number(numbers, which, column, EACH: tl.constexpr, T: tl.constexpr):
    return tl.load(numbers + which * EACH + column).to(T)


@triton.jit
def _divided(a, b, T: tl.constexpr):
    """Correctly rounded: `/` of float32 is not."""
    return a / b if tl.float64 == T else tl.div_rn(a, b)


@triton.jit
def _root(x, T: tl.constexpr):
    return tl.sqrt(x) if tl.float64 == T else tl.sqrt_rn(x)


# ------------------------------------------------------------------------------------------------ noise


@triton.jit
def _philox(c0, c1, c2, c3, k0, k1):
    """Philox4x32 with seven rounds, on uint32."""
    for _ in tl.static_range(7):
        high0, low0 = tl.umulhi(c0, 0xD2511F53), c0 * 0xD2511F53
        high1, low1 = tl.umulhi(c2, 0xCD9E8D57), c2 * 0xCD9E8D57
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 = k0 + 0x9E3779B9
        k1 = k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def _unsigned(value):
    return value.to(tl.int32).to(tl.uint32, bitcast=True)


@triton.jit
def _lane_words(position, index, seed_low, seed_high, stream_low, stream_high, T: tl.constexpr):
    """The four words of the block that an element's number comes from, and its lane in its tile of 64."""
    tile, lane = position // 64, (position % 32).to(tl.int32)
    own = lane if tl.float64 == T else lane // 2
    block = (tile * 32 + own).to(tl.uint32)
    zero = block * 0
    x, y, z, w = _philox(
        block,
        zero + index.to(tl.uint32),
        zero + _unsigned(stream_low),
        zero + _unsigned(stream_high),
        zero + _unsigned(seed_low),
        zero + _unsigned(seed_high),
    )
    return x, y, z, w, lane


@triton.jit
def _minus_two_log(k):
    """−2 ln(k / 2³¹) for k ≥ 1, the arithmetic of `gaussian.h`: the logarithm of the hardware is not exact near 1."""
    bits = k.to(tl.float32).to(tl.int32, bitcast=True) - 0x3F3504F3
    exponent = ((bits >> 23) - 31).to(tl.float32)
    y = ((bits & 0x007FFFFF) + 0x3F3504F3).to(tl.float32, bitcast=True) - 1.0
    p = y * 7.0376836292e-2 - 1.1514610310e-1
    p = p * y + 1.1676998740e-1
    p = p * y - 1.2420140846e-1
    p = p * y + 1.4249322787e-1
    p = p * y - 1.6668057665e-1
    p = p * y + 2.0000714765e-1
    p = p * y - 2.4999993993e-1
    p = p * y + 3.3333331174e-1
    return -2.0 * (exponent * 0.693147180559945 + (y + y * y * (p * y - 0.5)))


@triton.jit
def _single(x, y, z, w, lane, second):
    """A float32 normal: lanes 2b and 2b + 1 share a block."""
    odd = (lane % 2) == 1
    radius, angle = tl.where(odd, z, x), tl.where(odd, w, y)
    length = tl.sqrt_rn(_minus_two_log(((radius >> 1) | 1).to(tl.int32)))
    r = tl.where((angle & 1) == 1, -length, length)
    t = (((angle >> 2) | 1).to(tl.int32) - 0x20000000).to(tl.float32) * 1.4629180792671596e-09  # π/4 · 2⁻²⁹
    s = t * t
    sine = t + t * s * ((s * -1.9515295891e-4 + 8.3321608736e-3) * s - 1.6666654611e-1)
    cosine = (
        1.0 - 0.5 * s + s * s * ((s * 2.443315711809948e-5 - 1.388731625493765e-3) * s + 4.166664568298827e-2)
    )
    return tl.where(((angle & 2) == 2) ^ second, r * sine, r * cosine)


@triton.jit
def _double(x, y, z, w, second):
    """A float64 normal: each lane has a block."""
    radius = x.to(tl.uint64) | (y.to(tl.uint64) << 32)
    angle = z.to(tl.uint64) | (w.to(tl.uint64) << 32)
    u = ((radius >> 11) | 1).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16  # 2⁻⁵³
    length = tl.sqrt(-2.0 * tl.log(u))
    r = tl.where((angle & 1) == 1, -length, length)
    t = (((angle >> 11) | 1).to(tl.int64) - 0x10000000000000).to(
        tl.float64
    ) * 1.743934249004316e-16  # π/4 · 2⁻⁵²
    s = t * t  # fdlibm's polynomials: the library's own also reduce arguments beyond π/4, in many registers
    p = s * 1.58969099521155010221e-10 - 2.50507602534068634195e-08
    p = p * s + 2.75573137070700676789e-06
    p = p * s - 1.98412698298579493134e-04
    p = p * s + 8.33333333332248946124e-03
    p = p * s - 1.66666666666666324348e-01
    q = s * -1.13596475577881948265e-11 + 2.08757232129817482790e-09
    q = q * s - 2.75573143513906633035e-07
    q = q * s + 2.48015872894767294178e-05
    q = q * s - 1.38888888888741095749e-03
    q = q * s + 4.16666666666666019037e-02
    sine, cosine = t + t * s * p, 1.0 - (0.5 * s - s * s * q)
    return tl.where(((angle & 2) == 2) ^ second, r * sine, r * cosine)


@triton.jit
def _normal(position, index, seed_low, seed_high, stream_low, stream_high, T: tl.constexpr):
    """ε at the positions, the numbers of `gaussian.h` and `philox.py`."""
    x, y, z, w, lane = _lane_words(position, index, seed_low, seed_high, stream_low, stream_high, T)
    second = (position // 32) % 2 == 1
    return _double(x, y, z, w, second) if tl.float64 == T else _single(x, y, z, w, lane, second)


KEY = ["seed_low", "seed_high", "stream_low", "stream_high", "count"]


@triton.jit(do_not_specialize=KEY)
def words(out, index, seed_low, seed_high, stream_low, stream_high, count, SIZE: tl.constexpr):
    """The four words of the first `count` blocks, for the tests."""
    k = tl.arange(0, SIZE)
    position = (k.to(tl.int64) // 32) * 64 + k % 32  # float64 lanes have a block each
    x, y, z, w, _ = _lane_words(position, index, seed_low, seed_high, stream_low, stream_high, tl.float64)
    tl.store(out + 4 * k, x.to(tl.int64), k < count)
    tl.store(out + 4 * k + 1, y.to(tl.int64), k < count)
    tl.store(out + 4 * k + 2, z.to(tl.int64), k < count)
    tl.store(out + 4 * k + 3, w.to(tl.int64), k < count)


@triton.jit(do_not_specialize=KEY)
def sample(
    table, numbers, seed_low, seed_high, stream_low, stream_high, count,
    SHIFTS: tl.constexpr, MOVED: tl.constexpr,
    T: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, TENSORS: tl.constexpr,
):  # fmt: skip
    """w ← μ (+ offset) + ε·√(scale / (curvature + shift)).

    Rows: blocks, sizes, indices, weights, means, curvatures, shifts, offsets. Numbers: scale, shift.
    """
    which, block = _tensor(table, count, TENSORS)
    size, index = tl.load(table + count + which), tl.load(table + 2 * count + which)
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    mean = tl.load(_row(table, count, 4, which, T, ALIGNED) + at, inside)
    precision = tl.load(_row(table, count, 5, which, T, ALIGNED) + at, inside, other=1.0)
    if SHIFTS:
        precision += tl.load(_row(table, count, 6, which, T, ALIGNED) + at, inside, other=0.0)
    else:
        precision += _number(numbers, which, 1, 2, T)
    if MOVED:
        mean += tl.load(_row(table, count, 7, which, T, ALIGNED) + at, inside)
    sigma = _root(_divided(_number(numbers, which, 0, 2, T), precision, T), T)
    noise = _normal(at, index, seed_low, seed_high, stream_low, stream_high, T)
    tl.store(_row(table, count, 3, which, T, ALIGNED) + at, mean + noise * sigma, inside)


@triton.jit(do_not_specialize=KEY)
def perturb(
    table, numbers, seed_low, seed_high, stream_low, stream_high, count,
    T: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, TENSORS: tl.constexpr,
):  # fmt: skip
    """mean ← mean + √(variance + tiny)·ε, variance ← ε / 2√(variance + tiny).

    Rows: blocks, sizes, indices, means, variances. Numbers: tiny.
    """
    which, block = _tensor(table, count, TENSORS)
    size, index = tl.load(table + count + which), tl.load(table + 2 * count + which)
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    means, variances = _row(table, count, 3, which, T, ALIGNED), _row(table, count, 4, which, T, ALIGNED)
    sd = _root(tl.load(variances + at, inside, other=1.0) + _number(numbers, which, 0, 1, T), T)
    noise = _normal(at, index, seed_low, seed_high, stream_low, stream_high, T)
    tl.store(means + at, tl.load(means + at, inside) + sd * noise, inside)
    tl.store(variances + at, _divided(noise, 2 * sd, T), inside)


# ------------------------------------------------------------------------------------------------ updates


@triton.jit(do_not_specialize=["count"])
def all_finite(
    table, flag, count, T: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, TENSORS: tl.constexpr
):
    """flag ← 0 where an element of a list is infinite or NaN. Rows: blocks, sizes, tensors."""
    which, block = _tensor(table, count, TENSORS)
    size = tl.load(table + count + which)
    at = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(_row(table, count, 2, which, T, ALIGNED) + at, at < size, other=0.0)
    away = x - x  # zero, and NaN for those that are not finite
    if tl.max((away != 0).to(tl.int32), 0) > 0:
        tl.store(flag, 0)  # whoever comes last writes the same


@triton.jit(do_not_specialize=["count"])
def vogn(
    table, numbers, flag, count,
    CHECKED: tl.constexpr, PRIORS: tl.constexpr, PRIOR_MEANS: tl.constexpr, AWAY: tl.constexpr,
    AVERAGES: tl.constexpr, T: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, TENSORS: tl.constexpr,
):  # fmt: skip
    """m ← β₁m + ĝ + δ̃(z − μ₀), s ← (1 − β₂)s + β₂ĥ, z ← z − α·m/(s + δ̃ + γ), μ ← μ + w(z − μ).

    Rows: blocks, sizes, means, momenta, curvatures, gradients, squares, priors, prior means, where the means are,
    offsets z − μ. Where the flag is zero the mean comes home, and nothing else changes. Numbers as in
    `update.cpp`.
    """
    which, block = _tensor(table, count, TENSORS)
    size = tl.load(table + count + which)
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    prior = _number(numbers, which, 6, 8, T)
    if PRIORS:
        prior = tl.load(_row(table, count, 7, which, T, ALIGNED) + at, inside, other=1.0)
    origin = tl.load(_row(table, count, 9 if AWAY else 2, which, T, ALIGNED) + at, inside)
    old_momentum = tl.load(_row(table, count, 3, which, T, ALIGNED) + at, inside)
    old_curvature = tl.load(_row(table, count, 4, which, T, ALIGNED) + at, inside, other=1.0)
    gradient = tl.load(_row(table, count, 5, which, T, ALIGNED) + at, inside)
    squares = tl.load(_row(table, count, 6, which, T, ALIGNED) + at, inside)
    iterate, old_offset = origin, origin
    if AVERAGES:
        old_offset = tl.load(_row(table, count, 10, which, T, ALIGNED) + at, inside)
        iterate = origin + old_offset
    away = iterate
    if PRIOR_MEANS:
        away = iterate - tl.load(_row(table, count, 8, which, T, ALIGNED) + at, inside)
    beta2 = tl.load(numbers + which * 8 + 2)
    scaled = _number(numbers, which, 4, 8, T) * gradient
    momentum = _number(numbers, which, 1, 8, T) * old_momentum + scaled + prior * away
    curvature = (1 - beta2).to(T) * old_curvature + beta2.to(T) * (_number(numbers, which, 5, 8, T) * squares)
    total = curvature + prior + _number(numbers, which, 3, 8, T)
    mean = iterate - _divided(_number(numbers, which, 0, 8, T) * momentum, total, T)
    if AVERAGES:
        offset = mean - origin
        step = _number(numbers, which, 7, 8, T) * offset
        mean = origin + step
        offset -= step
    if CHECKED:
        good = tl.load(flag) != 0
        mean = tl.where(good, mean, origin)
        momentum = tl.where(good, momentum, old_momentum)
        curvature = tl.where(good, curvature, old_curvature)
        if AVERAGES:
            offset = tl.where(good, offset, old_offset)
    tl.store(_row(table, count, 3, which, T, ALIGNED) + at, momentum, inside)
    tl.store(_row(table, count, 4, which, T, ALIGNED) + at, curvature, inside)
    tl.store(_row(table, count, 2, which, T, ALIGNED) + at, mean, inside)
    if AVERAGES:
        tl.store(_row(table, count, 10, which, T, ALIGNED) + at, offset, inside)


@triton.jit(do_not_specialize=["count"])
def ivon(
    table, numbers, flag, count,
    CHECKED: tl.constexpr, PRIORS: tl.constexpr, PRIOR_MEANS: tl.constexpr, AVERAGES: tl.constexpr,
    T: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, TENSORS: tl.constexpr,
):  # fmt: skip
    """ĥ = product·(h + δ̃)·unit; m ← b₁m + (1 − b₁)ĝ; h ← h + d + d²/2(h + δ̃), d = (1 − b₂)(ĥ − h);
    μ ← μ − α·clip((m/(1 − b₁ᵗ) + δ̃(μ − μ₀)) / (h + δ̃)).

    Rows: blocks, sizes, means, momenta, curvatures, gradients, products, priors, prior means, nothing, offsets z − μ:
    with these the iterate z is moved, and μ ← μ + w(z − μ). Numbers as in `ivon.cpp`, and w.
    """
    which, block = _tensor(table, count, TENSORS)
    size = tl.load(table + count + which)
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    prior = _number(numbers, which, 7, 9, T)
    if PRIORS:
        prior = tl.load(_row(table, count, 7, which, T, ALIGNED) + at, inside, other=1.0)
    old_mean = tl.load(_row(table, count, 2, which, T, ALIGNED) + at, inside)
    old_momentum = tl.load(_row(table, count, 3, which, T, ALIGNED) + at, inside)
    h = tl.load(_row(table, count, 4, which, T, ALIGNED) + at, inside, other=1.0)
    gradient = tl.load(_row(table, count, 5, which, T, ALIGNED) + at, inside)
    product = tl.load(_row(table, count, 6, which, T, ALIGNED) + at, inside)
    iterate, old_offset = old_mean, old_mean
    if AVERAGES:
        old_offset = tl.load(_row(table, count, 10, which, T, ALIGNED) + at, inside)
        iterate = old_mean + old_offset
    away = iterate
    if PRIOR_MEANS:
        away = iterate - tl.load(_row(table, count, 8, which, T, ALIGNED) + at, inside)
    beta1, beta2 = tl.load(numbers + which * 9 + 1), tl.load(numbers + which * 9 + 2)
    total = h + prior
    scaled = _number(numbers, which, 5, 9, T) * gradient
    momentum = beta1.to(T) * old_momentum + (1 - beta1).to(T) * scaled
    d = (1 - beta2).to(T) * (_number(numbers, which, 6, 9, T) * product * total - h)
    grown = h + d + d * _divided(d, 2 * total, T)
    curvature = tl.where(grown < 1e30, grown, 1e30)  # an infinite curvature would be a variance of zero
    radius = _number(numbers, which, 4, 9, T)
    push = _number(numbers, which, 3, 9, T) * momentum + prior * away
    step = _divided(push, curvature + prior, T)
    step = tl.where(step < -radius, -radius, step)
    step = tl.where(step > radius, radius, step)
    mean = iterate - _number(numbers, which, 0, 9, T) * step
    if AVERAGES:
        offset = mean - old_mean
        own = _number(numbers, which, 8, 9, T) * offset
        mean = old_mean + own
        offset -= own
    if CHECKED:
        good = tl.load(flag) != 0
        mean = tl.where(good, mean, old_mean)
        momentum = tl.where(good, momentum, old_momentum)
        curvature = tl.where(good, curvature, h)
        if AVERAGES:
            offset = tl.where(good, offset, old_offset)
    tl.store(_row(table, count, 2, which, T, ALIGNED) + at, mean, inside)
    tl.store(_row(table, count, 3, which, T, ALIGNED) + at, momentum, inside)
    tl.store(_row(table, count, 4, which, T, ALIGNED) + at, curvature, inside)
    if AVERAGES:
        tl.store(_row(table, count, 10, which, T, ALIGNED) + at, offset, inside)


@triton.jit(do_not_specialize=["count"])
def restore(
    table, count,
    ADD: tl.constexpr, T: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, TENSORS: tl.constexpr,
):  # fmt: skip
    """product ← (product +) gradient·(weight − mean), weight ← mean. Rows: blocks, sizes, and these, gradients last."""
    which, block = _tensor(table, count, TENSORS)
    size = tl.load(table + count + which)
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    weight, products = _row(table, count, 2, which, T, ALIGNED), _row(table, count, 4, which, T, ALIGNED)
    mean = tl.load(_row(table, count, 3, which, T, ALIGNED) + at, inside)
    gradient = tl.load(_row(table, count, 5, which, T, ALIGNED) + at, inside)
    own = gradient * (tl.load(weight + at, inside) - mean)
    if ADD:
        own += tl.load(products + at, inside)
    tl.store(products + at, own, inside)
    tl.store(weight + at, mean, inside)
