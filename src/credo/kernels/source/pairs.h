// Vectors of pairs a₀ b₀ a₁ b₁ …, here a number and its square: what is done to one is done to both.
#pragma once

#include <cstring>

#include "simd.h"

namespace {

template <int half, typename Vector, int... lane>
CREDO_INLINE Vector paired(Vector a, Vector b, std::integer_sequence<int, lane...>) {
    constexpr int width = sizeof...(lane);
    return shuffled<(half * width / 2 + lane / 2 + lane % 2 * width)...>(a, b);
}

template <int which, typename Vector, int... lane>
CREDO_INLINE Vector unpaired(Vector first, Vector second, std::integer_sequence<int, lane...>) {
    return shuffled<(2 * lane + which)...>(first, second);
}

template <typename T>
struct Pairs {
    using Vector = typename Simd<T>::Vector;
    static constexpr int width = Simd<T>::width, count = width / 2;  // pairs in a vector
    static constexpr auto lanes = std::make_integer_sequence<int, width>();

    Vector first, second;  // the pairs of the lower lanes, and those of the upper

    static CREDO_INLINE Pairs of(Vector a, Vector b) { return {paired<0>(a, b, lanes), paired<1>(a, b, lanes)}; }
    CREDO_INLINE Vector a() const { return unpaired<0>(first, second, lanes); }
    CREDO_INLINE Vector b() const { return unpaired<1>(first, second, lanes); }
};

// The pair that lies at `from`, again and again. Compilers would go by way of the stack.
CREDO_INLINE Simd<float>::Vector repeated_pair(const float* from) {
    uint64_t pair;
    std::memcpy(&pair, from, sizeof pair);
    return reinterpret_cast<Simd<float>::Vector>(Simd<uint64_t>::Vector{} + pair);
}

CREDO_INLINE Simd<double>::Vector repeated_pair(const double* from) {
#if defined(CREDO_ISA_AVX512)
    return _mm512_broadcast_f64x2(_mm_loadu_pd(from));
#elif defined(CREDO_ISA_AVX2)
    return _mm256_broadcast_pd(reinterpret_cast<const __m128d*>(from));
#else
    return Simd<double>::load(from);
#endif
}

}  // namespace
