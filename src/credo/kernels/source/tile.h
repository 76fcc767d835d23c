// The inner loop: one tile of one example's gradient in registers, then its sum and its square added.
//
//     own[r][v] = Σ_p left[p][r] · right[p][v]        total += own        squares += own²
//
// `left` gives scalars, broadcast straight from memory; `right` gives vectors. The places p are a box in three
// dimensions, and each tap of the convolution has its own. Totals of all taps of a tile stay in the L1 cache while the
// examples pass by, so no example's gradient is ever written to memory.
#pragma once

#include "simd.h"

namespace {

// Elements from one example, and from one place of the output in each dimension, to the next.
struct Steps {
    int64_t example, z, y, x;
};

// Where the places of one tap begin in either operand, and how many there are.
struct Tap {
    int64_t left, right, z, y, x;
};

template <typename T>
struct Sweep {
    const T *left, *right;
    Steps left_steps, right_steps;
    int64_t next_vector;  // elements from one vector of `right` to the next
    int64_t examples;
    const Tap* taps;
    int64_t tap_count;
    T* sums;  // [tap][total, squares][row][vector][lane]
};

template <typename T, int rows, int vectors>
struct Tile {
    using S = Simd<T>;
    typename S::Vector own[rows][vectors];

    CREDO_INLINE void clear() {
        CREDO_UNROLL
        for (int r = 0; r < rows; ++r)
            CREDO_UNROLL
            for (int v = 0; v < vectors; ++v) own[r][v] = typename S::Vector{};
    }

    CREDO_INLINE void add_product(const T* left, const T* right, int64_t next_vector) {
        typename S::Vector column[vectors];
        CREDO_UNROLL
        for (int v = 0; v < vectors; ++v) column[v] = S::load(right + v * next_vector);
        CREDO_UNROLL
        for (int r = 0; r < rows; ++r)
            CREDO_UNROLL
            for (int v = 0; v < vectors; ++v) own[r][v] += left[r] * column[v];
    }

    CREDO_INLINE void add_to(T* total, T* squares) const {
        CREDO_UNROLL
        for (int r = 0; r < rows; ++r)
            CREDO_UNROLL
            for (int v = 0; v < vectors; ++v) {
                const int at = (r * vectors + v) * S::width;
                S::store(total + at, S::load(total + at) + own[r][v]);
                S::store(squares + at, S::load(squares + at) + own[r][v] * own[r][v]);
            }
    }
};

template <typename T, int rows, int vectors>
void sweep(const Sweep<T>& job) {
    constexpr int size = rows * vectors * Simd<T>::width;
    const Steps &l = job.left_steps, &r = job.right_steps;
    for (int64_t m = 0; m < job.examples; ++m)
        for (int64_t k = 0; k < job.tap_count; ++k) {
            const Tap& tap = job.taps[k];
            Tile<T, rows, vectors> tile;
            tile.clear();
            for (int64_t z = 0; z < tap.z; ++z)
                for (int64_t y = 0; y < tap.y; ++y) {
                    const T* left = job.left + tap.left + m * l.example + z * l.z + y * l.y;
                    const T* right = job.right + tap.right + m * r.example + z * r.z + y * r.y;
                    for (int64_t x = 0; x < tap.x; ++x, left += l.x, right += r.x)
                        tile.add_product(left, right, job.next_vector);
                }
            tile.add_to(job.sums + 2 * k * size, job.sums + (2 * k + 1) * size);
        }
}

// The largest tiles that leave registers for the operands: two vectors wide, or one and then taller.
constexpr int most_vectors = 2;
constexpr int most_rows = registers / 2;                    // of tiles one vector wide
constexpr int most_rows_wide = (registers - 4) / 2;         // of tiles two vectors wide
constexpr int64_t sums_bytes = 24 << 10;                    // of all taps of a tile: half of an L1 cache

template <typename T>
using SweepFunction = void (*)(const Sweep<T>&);

template <typename T, int vectors, int... row>
SweepFunction<T> pick(int rows, std::integer_sequence<int, row...>) {
    static constexpr SweepFunction<T> table[] = {sweep<T, row + 1, vectors>...};
    return table[rows - 1];
}

template <typename T>
SweepFunction<T> sweep_of(int rows, int vectors) {
    if (vectors == 1) return pick<T, 1>(rows, std::make_integer_sequence<int, most_rows>());
    return pick<T, 2>(rows, std::make_integer_sequence<int, most_rows_wide>());
}

}  // namespace
