// Gaussian noise from a counter: Philox4x32 turns a key and a position into bits, Box–Muller turns bits into numbers.
//
// A number depends on nothing but its key and its position, so threads, chunks and vector widths cannot change it.
// Numbers come in tiles of 64; tile t owns the Philox blocks 32t … 32t+31. Lane i of a tile yields the numbers i and
// 32+i. float32 lanes take two words each, so a tile uses its first 16 blocks, lanes 2b and 2b+1 from block b; float64
// lanes take all four words of a block. `philox.py` holds the same in plain torch.
#pragma once

#include <cstring>

#include "lists.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr int lanes = tile_size / 2;

struct Key {
    uint64_t seed, stream, index;  // of a run; of a draw in it; of a tensor in that
};

using Lanes = Simd<uint64_t>::Vector;

struct Words {
    Lanes x, y, z, w;  // 32 bits a lane; the upper halves hold rubbish
};

template <typename To, typename From>
CREDO_INLINE To as(From value) {
    To result;
    static_assert(sizeof(To) == sizeof(From), "the bits must fit");
    std::memcpy(&result, &value, sizeof(To));
    return result;
}

CREDO_INLINE float root(float x) { return __builtin_sqrtf(x); }
CREDO_INLINE double root(double x) { return __builtin_sqrt(x); }

// The product of the lower halves. Compilers multiply all 64 bits, at three times the price.
CREDO_INLINE Lanes multiply(Lanes a, uint32_t b) {
    const Lanes factor = Lanes{} + b;
#if defined(CREDO_ISA_AVX512)
    return as<Lanes>(_mm512_mul_epu32(as<__m512i>(a), as<__m512i>(factor)));
#elif defined(CREDO_ISA_AVX2)
    return as<Lanes>(_mm256_mul_epu32(as<__m256i>(a), as<__m256i>(factor)));
#elif defined(__x86_64__)
    return as<Lanes>(_mm_mul_epu32(as<__m128i>(a), as<__m128i>(factor)));
#else
    return (a & 0xffffffffu) * factor;
#endif
}

// Seven rounds: the fewest that pass BigCrush (Salmon et al. 2011), and plain torch pays for each.
CREDO_INLINE Words philox(Key key, Lanes block) {
    Words c = {block, Lanes{} + key.index, Lanes{} + key.stream, Lanes{} + (key.stream >> 32)};
    CREDO_UNROLL
    for (uint32_t round = 0; round < 7; ++round) {
        const uint32_t k0 = uint32_t(key.seed) + round * 0x9E3779B9u;
        const uint32_t k1 = uint32_t(key.seed >> 32) + round * 0xBB67AE85u;
        const Lanes p = multiply(c.x, 0xD2511F53u), q = multiply(c.z, 0xCD9E8D57u);
        c = {q >> 32 ^ c.y ^ k0, q, p >> 32 ^ c.w ^ k1, p};
    }
    return c;
}

CREDO_INLINE Lanes join(Lanes first, Lanes second) { return (first & 0xffffffffu) | second << 32; }

// 0, 1, 2, …
template <uint64_t... lane>
CREDO_INLINE Lanes numbered(std::integer_sequence<uint64_t, lane...>) {
    return Lanes{lane...};
}

// Calls body(b, words) for the blocks b of a tile, a vector of them at a time.
template <int blocks, typename Body>
CREDO_INLINE void for_blocks(Key key, uint64_t tile, const Body& body) {
    Lanes counter = tile * lanes + numbered(std::make_integer_sequence<uint64_t, Simd<uint64_t>::width>());
    for (int b = 0; b < blocks; b += Simd<uint64_t>::width, counter += Simd<uint64_t>::width)
        body(b, philox(key, counter));
}

CREDO_INLINE void draw(Key key, uint64_t tile, uint32_t (&radius)[lanes], uint32_t (&angle)[lanes]) {
    for_blocks<lanes / 2>(key, tile, [&](int b, const Words& word) {
        const Lanes r = join(word.x, word.z), a = join(word.y, word.w);
        std::memcpy(radius + 2 * b, &r, sizeof r);
        std::memcpy(angle + 2 * b, &a, sizeof a);
    });
}

CREDO_INLINE void draw(Key key, uint64_t tile, uint64_t (&radius)[lanes], uint64_t (&angle)[lanes]) {
    for_blocks<lanes>(key, tile, [&](int b, const Words& word) {
        Simd<uint64_t>::store(radius + b, join(word.x, word.y));
        Simd<uint64_t>::store(angle + b, join(word.z, word.w));
    });
}

// −2 ln(k / 2³¹)  for k ≥ 1. ln k = e·ln 2 + ln m with √½ ≤ m < √2; the polynomial is Cephes' logf.
CREDO_INLINE float minus_two_log(int32_t k) {
    const int32_t bits = as<int32_t>(float(k)) - 0x3f3504f3;  // √½
    const float exponent = float((bits >> 23) - 31);
    const float y = as<float>((bits & 0x007fffff) + 0x3f3504f3) - 1.0f;
    float p = 7.0376836292e-2f;
    p = p * y - 1.1514610310e-1f;
    p = p * y + 1.1676998740e-1f;
    p = p * y - 1.2420140846e-1f;
    p = p * y + 1.4249322787e-1f;
    p = p * y - 1.6668057665e-1f;
    p = p * y + 2.0000714765e-1f;
    p = p * y - 2.4999993993e-1f;
    p = p * y + 3.3333331174e-1f;
    const float log_m = y + y * y * (p * y - 0.5f);
    return -2.0f * (exponent * 0.693147180559945f + log_m);
}

CREDO_INLINE float sine(float x) {  // |x| ≤ π/4, as in Cephes
    const float z = x * x;
    return x + x * z * ((-1.9515295891e-4f * z + 8.3321608736e-3f) * z - 1.6666654611e-1f);
}

CREDO_INLINE float cosine(float x) {
    const float z = x * x;
    return 1.0f - 0.5f * z + z * z * ((2.443315711809948e-5f * z - 1.388731625493765e-3f) * z + 4.166664568298827e-2f);
}

// An odd number below 2⁵³ as a double, exactly; no vector conversion from int64 exists before AVX-512.
CREDO_INLINE double exact(uint64_t k) {
    constexpr uint64_t magic = 0x4330000000000000;  // 2⁵², whose last bit counts one
    const double high = as<double>(magic | k >> 27) - 0x1p52, low = as<double>(magic | (k & 0x7ffffff)) - 0x1p52;
    return high * 0x1p27 + low;
}

// −2 ln(k / 2⁵³); the polynomial is fdlibm's log.
CREDO_INLINE double minus_two_log(double k) {
    const int64_t bits = as<int64_t>(k) - 0x3fe6a09e667f3bcd;  // √½
    // The exponent is small and not negative: biased by 2⁵² it converts by subtraction, as in `exact`.
    const double exponent = as<double>(0x4330000000000000 | uint64_t(bits) >> 52) - (0x1p52 + 53);
    const double f = as<double>((bits & 0x000fffffffffffff) + 0x3fe6a09e667f3bcd) - 1.0;
    const double s = f / (2.0 + f), z = s * s, w = z * z;
    double even = 1.531383769920937332e-01;
    even = even * w + 2.222219843214978396e-01;
    even = even * w + 3.999999999940941908e-01;
    double odd = 1.479819860511658591e-01;
    odd = odd * w + 1.818357216161805012e-01;
    odd = odd * w + 2.857142874366239149e-01;
    odd = odd * w + 6.666666666666735130e-01;
    const double half_square = 0.5 * f * f;
    const double log_m = f - (half_square - s * (half_square + w * even + z * odd));
    return -2.0 * (exponent * 0.69314718055994530942 + log_m);
}

CREDO_INLINE double sine(double x) {  // |x| ≤ π/4, as in fdlibm
    const double z = x * x;
    double p = 1.58969099521155010221e-10;
    p = p * z - 2.50507602534068634195e-08;
    p = p * z + 2.75573137070700676789e-06;
    p = p * z - 1.98412698298579493134e-04;
    p = p * z + 8.33333333332248946124e-03;
    p = p * z - 1.66666666666666324348e-01;
    return x + x * z * p;
}

CREDO_INLINE double cosine(double x) {
    const double z = x * x;
    double p = -1.13596475577881948265e-11;
    p = p * z + 2.08757232129817482790e-09;
    p = p * z - 2.75573143513906633035e-07;
    p = p * z + 2.48015872894767294178e-05;
    p = p * z - 1.38888888888741095749e-03;
    p = p * z + 4.16666666666666019037e-02;
    return 1.0 - (0.5 * z - z * z * p);
}

// The angle's last two bits choose one of the four images of |x| ≤ π/4 that cover the circle: the sign of both
// numbers, and which of them is the sine. So both are as exact near zero as anywhere.
CREDO_INLINE void gaussians(Key key, uint64_t tile, float* out) {
    uint32_t radius[lanes], angle[lanes];
    draw(key, tile, radius, angle);
#pragma omp simd
    for (int i = 0; i < lanes; ++i) {
        const float length = root(minus_two_log(int32_t(radius[i] >> 1 | 1)));
        const float r = as<float>(as<uint32_t>(length) ^ angle[i] << 31);
        const float x = float(int32_t(angle[i] >> 2 | 1) - (1 << 29)) * float(0.78539816339744830962 * 0x1p-29);
        const float s = r * sine(x), c = r * cosine(x);
        const bool swapped = angle[i] & 2;
        out[i] = swapped ? s : c;
        out[lanes + i] = swapped ? c : s;
    }
}

CREDO_INLINE void gaussians(Key key, uint64_t tile, double* out) {
    uint64_t radius[lanes], angle[lanes];
    draw(key, tile, radius, angle);
#pragma omp simd
    for (int i = 0; i < lanes; ++i) {
        const double length = root(minus_two_log(exact(radius[i] >> 11 | 1)));
        const double r = as<double>(as<uint64_t>(length) ^ angle[i] << 63);
        const double x = (exact(angle[i] >> 11 | 1) - 0x1p52) * (0.78539816339744830962 * 0x1p-52);
        const double s = r * sine(x), c = r * cosine(x);
        const bool swapped = angle[i] & 2;
        out[i] = swapped ? s : c;
        out[lanes + i] = swapped ? c : s;
    }
}

}  // namespace
