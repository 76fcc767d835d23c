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

// Tiles two vectors wide, or one and then taller. They leave registers for the operands, and are no higher than that
// the operands of an example and the sums of all taps fit the L1 cache together.
constexpr int most_vectors = 2;
constexpr int most_rows = registers / 2, most_rows_wide = registers == 32 ? 8 : 6;
constexpr int few_rows = registers / 4, few_places = 4;
constexpr int64_t sums_bytes = 24 << 10, most_taps = sums_bytes / (2 * vector_bytes);

// Elements from one example, and from one place of the output in each dimension, to the next.
struct Steps {
    int64_t example, z, y, x;
};

// Where the places of one tap begin in either operand, and how many there are.
struct Tap {
    int64_t left, right, z, y, x;

    int64_t places() const { return z * y * x; }
    bool few() const { return 0 < places() && places() <= few_places; }
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

// One example's own gradient at one tap, from where `left` and `right` point.
template <typename T, int rows, int vectors>
CREDO_INLINE void fill(Tile<T, rows, vectors>& own, const Sweep<T>& job, const Tap& tap, const T* left,
                       const T* right) {
    const Steps &l = job.left_steps, &r = job.right_steps;
    own.clear();
    for (int64_t z = 0; z < tap.z; ++z)
        for (int64_t y = 0; y < tap.y; ++y) {
            const T *left_row = left + z * l.z + y * l.y, *right_row = right + z * r.z + y * r.y;
            for (int64_t x = 0; x < tap.x; ++x, left_row += l.x, right_row += r.x)
                own.add_product(left_row, right_row, job.next_vector);
        }
}

// A tap of few places: adding to memory would take longer than the product, so the two sums are in registers as well.
// The tile is cut into pieces of `few_rows` by one vector, and the loop over places is unrolled.
template <typename T, int rows, int places>
void sweep_few(const Sweep<T>& job, const T* left, const T* right, const Tap& tap, T* total_to, T* squares_to,
               int64_t next) {
    int64_t left_at[places], right_at[places];
    for (int64_t p = 0; p < places; ++p) {
        const int64_t z = p / (tap.y * tap.x), y = p / tap.x % tap.y, x = p % tap.x;
        left_at[p] = z * job.left_steps.z + y * job.left_steps.y + x * job.left_steps.x;
        right_at[p] = z * job.right_steps.z + y * job.right_steps.y + x * job.right_steps.x;
    }
    Tile<T, rows, 1> total, squares;
    total.clear();
    squares.clear();
    for (int64_t m = 0; m < job.examples; ++m, left += job.left_steps.example, right += job.right_steps.example) {
        Tile<T, rows, 1> own;
        own.clear();
        CREDO_UNROLL
        for (int p = 0; p < places; ++p) own.add_product(left + left_at[p], right + right_at[p], 0);
        CREDO_UNROLL
        for (int r = 0; r < rows; ++r) {
            total.own[r][0] += own.own[r][0];
            squares.own[r][0] += own.own[r][0] * own.own[r][0];
        }
    }
    for (int r = 0; r < rows; ++r, total_to += next, squares_to += next) {
        Simd<T>::store(total_to, total.own[r][0]);
        Simd<T>::store(squares_to, squares.own[r][0]);
    }
}

template <typename T>
using FewFunction = void (*)(const Sweep<T>&, const T*, const T*, const Tap&, T*, T*, int64_t);

template <typename T, int... i>
FewFunction<T> pick_few(int64_t rows, int64_t places, std::integer_sequence<int, i...>) {
    static constexpr FewFunction<T> table[] = {sweep_few<T, i / few_places + 1, i % few_places + 1>...};
    return table[(rows - 1) * few_places + places - 1];
}

template <typename T>
void sweep_few_pieces(const Sweep<T>& job, const Tap& tap, int64_t rows, int64_t vectors, T* sums) {
    constexpr int width = Simd<T>::width;
    for (int64_t row = 0; row < rows; row += few_rows)
        for (int64_t v = 0; v < vectors; ++v) {
            const int64_t count = rows - row < few_rows ? rows - row : few_rows;
            constexpr auto table = std::make_integer_sequence<int, few_rows * few_places>();
            const auto piece = pick_few<T>(count, tap.places(), table);
            T* to = sums + (row * vectors + v) * width;
            piece(job, job.left + tap.left + row, job.right + tap.right + v * job.next_vector, tap, to,
                  to + rows * vectors * width, vectors * width);
        }
}

template <typename T, int rows, int vectors>
void sweep(const Sweep<T>& job) {
    constexpr int size = rows * vectors * Simd<T>::width;
    for (int64_t k = 0; k < job.tap_count; ++k)
        if (job.taps[k].few()) sweep_few_pieces(job, job.taps[k], rows, vectors, job.sums + 2 * k * size);
    for (int64_t m = 0; m < job.examples; ++m)
        for (int64_t k = 0; k < job.tap_count; ++k) {
            const Tap& tap = job.taps[k];
            if (tap.few()) continue;
            Tile<T, rows, vectors> own;
            fill(own, job, tap, job.left + tap.left + m * job.left_steps.example,
                 job.right + tap.right + m * job.right_steps.example);
            own.add_to(job.sums + 2 * k * size, job.sums + (2 * k + 1) * size);
        }
}

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
