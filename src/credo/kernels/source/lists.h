// A walk over lists of tensors in tiles, divided among threads.
#pragma once

#include <cstring>

#include "simd.h"

namespace {

constexpr int64_t tile_size = 64;          // elements; a whole number of vectors of every instruction set
constexpr int64_t tiles_per_thread = 128;  // fewer than this are done before another thread wakes up

CREDO_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
CREDO_INLINE int64_t larger(int64_t a, int64_t b) { return a < b ? b : a; }

// A tile, whole or the piece at the end; for a whole one, as most are, the compiler knows the size and calls nothing.
template <typename T>
CREDO_INLINE void copy(T* to, const T* from, int64_t count) {
    if (count == tile_size)
        std::memcpy(to, from, tile_size * sizeof(T));
    else
        std::memcpy(to, from, count * sizeof(T));
}

// `copy` of a tile past the caches, if `to` allows it: memory that is only written need not be fetched first. Whoever
// has done so ends with `arrive`, before others read.
template <typename T>
CREDO_INLINE void stream(T* to, const T* from, int64_t count) {
#if defined(CREDO_ISA_AVX512) || defined(CREDO_ISA_AVX2)
    if (count == tile_size && reinterpret_cast<uintptr_t>(to) % vector_bytes == 0) {
        CREDO_UNROLL
        for (int64_t i = 0; i < tile_size; i += Simd<T>::width) {
            const auto v = Simd<T>::load(from + i);
#if defined(CREDO_ISA_AVX512)
            _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), reinterpret_cast<__m512i>(v));
#else
            _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i), reinterpret_cast<__m256i>(v));
#endif
        }
        return;
    }
#endif
    copy(to, from, count);
}

CREDO_INLINE void arrive() {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

// Tensors of `sizes` elements; tensor k is a piece of a longer row and begins at its element starts[k], or 0.
struct List {
    int64_t count;
    const int64_t *sizes, *starts;

    CREDO_INLINE int64_t start(int64_t k) const { return starts ? starts[k] : 0; }
    int64_t elements() const {
        int64_t sum = 0;
        for (int64_t k = 0; k < count; ++k) sum += sizes[k];
        return sum;
    }
    CREDO_INLINE int64_t first_tile(int64_t k) const { return start(k) / tile_size; }
    CREDO_INLINE int64_t tiles(int64_t k) const {
        return (start(k) + sizes[k] + tile_size - 1) / tile_size - first_tile(k);
    }
};

// What lies in the tiles [first, last) of all the list's tiles: body(tensor, begin, end) for each piece of a tensor.
template <typename Body>
void visit(const List& list, int64_t first, int64_t last, const Body& body) {
    for (int64_t k = 0, before = 0; k < list.count && before < last; before += list.tiles(k++)) {
        const int64_t row = (list.first_tile(k) - before) * tile_size - list.start(k);
        const int64_t begin = larger(0, row + first * tile_size);
        const int64_t end = smaller(list.sizes[k], row + last * tile_size);
        if (begin < end) body(k, begin, end);
    }
}

// A list cut into as many parts as there are threads to use, between tiles only, so that no element's arithmetic depends
// on the number of threads.
struct Parts {
    const List& list;
    int64_t tiles, count;

    Parts(const List& list, int64_t threads) : list(list), tiles(0) {
        for (int64_t k = 0; k < list.count; ++k) tiles += list.tiles(k);
        count = larger(1, smaller(threads, tiles / tiles_per_thread));
    }

    template <typename Body>
    void visit(int64_t part, const Body& body) const {
        ::visit(list, tiles * part / count, tiles * (part + 1) / count, body);
    }
};

template <typename Body>
void divide(const List& list, int64_t threads, const Body& body) {
    const Parts parts(list, threads);
#pragma omp parallel for num_threads(parts.count) schedule(static, 1) if (parts.count > 1)
    for (int64_t part = 0; part < parts.count; ++part) parts.visit(part, body);
}

// Where `look` is true of all pieces, and only then, does `act` with each: the same thread does both, and has at hand
// what it looked at. Whether it was so.
template <typename Look, typename Act>
bool divide_if(const List& list, int64_t threads, const Look& look, const Act& act) {
    const Parts parts(list, threads);
    bool wrong = false;
    const auto inspect = [&](int64_t k, int64_t begin, int64_t end) {
        if (look(k, begin, end)) return;
#pragma omp atomic write
        wrong = true;
    };
#pragma omp parallel num_threads(parts.count) if (parts.count > 1)
    {
#pragma omp for schedule(static, 1)
        for (int64_t part = 0; part < parts.count; ++part) parts.visit(part, inspect);
#pragma omp for schedule(static, 1)
        for (int64_t part = 0; part < parts.count; ++part)
            if (!wrong) parts.visit(part, act);
    }
    return !wrong;
}

}  // namespace
