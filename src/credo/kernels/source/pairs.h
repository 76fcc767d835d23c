// Vectors of pairs a₀ b₀ a₁ b₁ …, here a number and its square: what is done to one is done to both.
#pragma once

#include <cstring>

#include "simd.h"

namespace {

// Whole: the first of two vectors has the pairs of the lower lanes, the second those of the upper. Nearby: each 16
// bytes are paired by themselves, which takes one instruction each way, so both vectors have pairs from all over.
enum class Order { whole, nearby };

// Lanes come in sections of `size`, and a section of the pairs is made of the same section of a and b.
template <int size, int half, typename Vector, int... lane>
CREDO_INLINE Vector paired(Vector a, Vector b, std::integer_sequence<int, lane...>) {
    constexpr int width = sizeof...(lane);
    return shuffled<(lane / size * size + half * size / 2 + lane % size / 2 + lane % 2 * width)...>(a, b);
}

template <int size, int which, typename Vector, int... lane>
CREDO_INLINE Vector unpaired(Vector first, Vector second, std::integer_sequence<int, lane...>) {
    constexpr int width = sizeof...(lane);
    return shuffled<(lane % size * 2 / size * width + lane / size * size + lane % size * 2 % size + which)...>(first,
                                                                                                              second);
}

template <typename T>
struct Pairs {
    using Vector = typename Simd<T>::Vector;
    static constexpr int width = Simd<T>::width, count = width / 2;  // pairs in a vector
    static constexpr auto lanes = std::make_integer_sequence<int, width>();

    template <Order order>
    static constexpr int section = order == Order::whole ? width : int(16 / sizeof(T));

    Vector first, second;

    template <Order order>
    static CREDO_INLINE Pairs of(Vector a, Vector b) {
        return {paired<section<order>, 0>(a, b, lanes), paired<section<order>, 1>(a, b, lanes)};
    }
    template <Order order>
    CREDO_INLINE Vector a() const {
        return unpaired<section<order>, 0>(first, second, lanes);
    }
    template <Order order>
    CREDO_INLINE Vector b() const {
        return unpaired<section<order>, 1>(first, second, lanes);
    }
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
