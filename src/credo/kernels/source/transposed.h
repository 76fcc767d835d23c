// Columns of a matrix that lie in vectors, put where its rows belong.
#pragma once

#include "geometry.h"

namespace {

// Its columns are `rows` times `taps` vectors, in this order.
template <typename T>
struct Matrix {
    using S = Simd<T>;

    const T* first;
    int64_t rows, taps, next_row, next_tap;  // elements from one vector to the next

    // Lane l of column j goes to to[l·step + j], or is added to what is there. A square of lanes at a time, in registers.
    void transpose_to(T* to, int64_t step, int64_t lanes, bool add) const {
        const T* from = first;
        for (int64_t left = rows * taps, tap = 0; left > 0; left -= S::width, to += S::width) {
            const int64_t columns = smaller(S::width, left);
            typename S::Vector square[S::width] = {};
            CREDO_UNROLL
            for (int j = 0; j < S::width; ++j) {
                if (j >= columns) break;
                square[j] = S::load(from);
                from += next_tap;
                if (++tap == taps) from += next_row - taps * next_tap, tap = 0;
            }
            transpose<S::width>(square);
            CREDO_UNROLL
            for (int l = 0; l < S::width; ++l) {
                if (l >= lanes) break;
                T* const line = to + l * step;
                S::store(line, add ? square[l] + S::load(line, columns) : square[l], columns);
            }
        }
    }
};

}  // namespace
