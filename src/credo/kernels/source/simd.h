// Vectors as wide as the instruction set has them, and the names that this compilation exports.
//
// Every source is compiled once per instruction set. All code lives in an anonymous namespace: two copies of an inline
// function would otherwise share one name, and the linker might keep the one that an older processor cannot run. For
// the same reason nothing from the standard library that has code of its own is used here.
#pragma once

#include <cstdint>
#include <utility>
#ifdef _OPENMP
#include <omp.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define CREDO_JOIN(a, b, c) a##_##b##_##c
#define CREDO_NAME(isa, name) CREDO_JOIN(credo, isa, name)
#define CREDO_EXPORT(name) extern "C" __attribute__((visibility("default"))) int64_t CREDO_NAME(CREDO_ISA, name)

#define CREDO_UNROLL _Pragma("GCC unroll 64")
#define CREDO_INLINE inline __attribute__((always_inline))

namespace {

#if defined(CREDO_ISA_AVX512)
constexpr int vector_bytes = 64, registers = 32;
#elif defined(CREDO_ISA_AVX2)
constexpr int vector_bytes = 32, registers = 16;
#else
constexpr int vector_bytes = 16, registers = 16;
#endif

// Which thread of a parallel region this is.
inline int thread_number() {
#ifdef _OPENMP
    return omp_get_thread_num();
#else
    return 0;
#endif
}

template <typename T>
struct Simd {
    static constexpr int width = vector_bytes / sizeof(T);
    typedef T Vector __attribute__((vector_size(vector_bytes)));
    typedef T Unaligned __attribute__((vector_size(vector_bytes), aligned(sizeof(T)), may_alias));

    static CREDO_INLINE Vector load(const T* from) { return *reinterpret_cast<const Unaligned*>(from); }
    static CREDO_INLINE void store(T* to, Vector v) { *reinterpret_cast<Unaligned*>(to) = v; }

    // The first `count` lanes alone, with zeros in the others; no memory beyond them is touched.
#if defined(CREDO_ISA_AVX512)
    static CREDO_INLINE Vector load(const T* from, int64_t count) {
        const uint32_t some = (1u << count) - 1;
        if constexpr (sizeof(T) == 4) return reinterpret_cast<Vector>(_mm512_maskz_loadu_epi32(some, from));
        if constexpr (sizeof(T) == 8) return reinterpret_cast<Vector>(_mm512_maskz_loadu_epi64(some, from));
    }
    static CREDO_INLINE void store(T* to, Vector v, int64_t count) {
        const uint32_t some = (1u << count) - 1;
        if constexpr (sizeof(T) == 4) _mm512_mask_storeu_epi32(to, some, reinterpret_cast<__m512i>(v));
        if constexpr (sizeof(T) == 8) _mm512_mask_storeu_epi64(to, some, reinterpret_cast<__m512i>(v));
    }
#elif defined(CREDO_ISA_AVX2)
    static CREDO_INLINE __m256i some(int64_t count) {
        if constexpr (sizeof(T) == 4)
            return _mm256_cmpgt_epi32(_mm256_set1_epi32(int(count)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
        if constexpr (sizeof(T) == 8)
            return _mm256_cmpgt_epi64(_mm256_set1_epi64x(count), _mm256_setr_epi64x(0, 1, 2, 3));
    }
    static CREDO_INLINE Vector load(const T* from, int64_t count) {
        if (count == width) return load(from);
        if constexpr (sizeof(T) == 4) return _mm256_maskload_ps(from, some(count));
        if constexpr (sizeof(T) == 8) return _mm256_maskload_pd(from, some(count));
    }
    static CREDO_INLINE void store(T* to, Vector v, int64_t count) {
        if (count == width) return store(to, v);
        if constexpr (sizeof(T) == 4) _mm256_maskstore_ps(to, some(count), v);
        if constexpr (sizeof(T) == 8) _mm256_maskstore_pd(to, some(count), v);
    }
#else
    static CREDO_INLINE Vector load(const T* from, int64_t count) {
        if (count == width) return load(from);
        T lanes[width] = {};
        for (int64_t lane = 0; lane < count; ++lane) lanes[lane] = from[lane];
        return load(lanes);
    }
    static CREDO_INLINE void store(T* to, Vector v, int64_t count) {
        if (count == width) return store(to, v);
        for (int64_t lane = 0; lane < count; ++lane) to[lane] = v[lane];
    }
#endif
};

// Lanes of a, then of b, by their numbers. GCC before 12 knows the same under another name.
template <int... lane, typename Vector>
CREDO_INLINE Vector shuffled(Vector a, Vector b) {
#if __has_builtin(__builtin_shufflevector)
    return __builtin_shufflevector(a, b, lane...);
#else
    typedef decltype(a < b) Numbers;
    return __builtin_shuffle(a, b, Numbers{lane...});
#endif
}

template <int width, int block, typename Vector, int... lane>
CREDO_INLINE void exchange(Vector& p, Vector& q, std::integer_sequence<int, lane...>) {
    const Vector low = shuffled<((lane & block) ? width + lane - block : lane)...>(p, q);
    q = shuffled<((lane & block) ? width + lane : lane + block)...>(p, q);
    p = low;
}

// Transpose a square of vectors in registers: exchange the off-diagonal blocks of 1, 2, 4, … lanes.
template <int width, int block = 1, typename Vector>
CREDO_INLINE void transpose(Vector (&rows)[width]) {
    if constexpr (block < width) {
        CREDO_UNROLL
        for (int i = 0; i < width; ++i) {
            if (i & block) continue;
            exchange<width, block>(rows[i], rows[i + block], std::make_integer_sequence<int, width>());
        }
        transpose<width, 2 * block>(rows);
    }
}

template <int width, int block, typename Vector, int... lane>
CREDO_INLINE Vector fold(Vector v, std::integer_sequence<int, lane...> lanes) {
    v += shuffled<(lane ^ block)...>(v, v);
    if constexpr (block > 1) return fold<width, block / 2>(v, lanes);
    return v;
}

// The sum of a vector's lanes, in pairs.
template <typename T>
CREDO_INLINE T lanes_sum(typename Simd<T>::Vector v) {
    constexpr int width = Simd<T>::width;
    return fold<width, width / 2>(v, std::make_integer_sequence<int, width>())[0];
}

}  // namespace
