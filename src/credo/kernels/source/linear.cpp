// Both sums of a linear layer's per-example gradients in one pass, one position an example:
//
//     total[o, i] = Σ_m g[m, o] x[m, i]        squares[o, i] = Σ_m g[m, o]² x[m, i]²
//
// and those of its bias, Σ_m g[m, o] and Σ_m g[m, o]². Two matrix products with one set of loads: a tile of `rows`
// outputs by two vectors of inputs keeps both sums in registers. The inputs of a panel are packed with their squares
// beside them, and so are the gradients, so that the inner loop does nothing but multiply and add.
#include "simd.h"

namespace {

constexpr int vectors = 2;
constexpr int rows = registers == 32 ? 6 : 3;  // 2 · rows · vectors sums, and 2 · vectors loads, fit the registers
constexpr int64_t block = 256;                 // examples in a packed panel: it stays in the cache
constexpr int64_t small = 1 << 18;             // multiplications: below this a second thread is not worth waking

template <typename T>
struct Problem {
    const T *x, *g;
    int64_t examples, inputs, outputs;
    T *total, *squares, *bias_total, *bias_squares;

    static constexpr int64_t columns() { return vectors * Simd<T>::width; }
    int64_t panels() const { return (inputs + columns() - 1) / columns(); }
    int64_t strips() const { return (outputs + rows - 1) / rows; }
};

CREDO_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

template <typename T>
CREDO_INLINE const T* copy(const T* from, int64_t count, T* to) {
    for (int64_t c = 0; c < count; ++c) to[c] = from[c];
    return to;
}

// The gradients of one strip of outputs as [example][g of each row, then g² of each row]; missing rows are zero.
template <typename T>
void pack_strip(const Problem<T>& p, int64_t strip, T* to) {
    T sums[2 * rows] = {};
    for (int64_t m = 0; m < p.examples; ++m, to += 2 * rows) {
        for (int r = 0; r < rows; ++r) {
            const int64_t o = strip * rows + r;
            const T g = o < p.outputs ? p.g[m * p.outputs + o] : T(0);
            sums[r] += to[r] = g;
            sums[rows + r] += to[rows + r] = g * g;
        }
    }
    if (!p.bias_total) return;
    for (int r = 0; r < rows && strip * rows + r < p.outputs; ++r) {
        p.bias_total[strip * rows + r] = sums[r];
        p.bias_squares[strip * rows + r] = sums[rows + r];
    }
}

// The inputs of one panel as [example][x of each column, then x² of each column]; missing columns are zero.
template <typename T>
void pack_panel(const Problem<T>& p, int64_t panel, int64_t first, int64_t last, T* to) {
    typedef Simd<T> S;
    constexpr int64_t columns = Problem<T>::columns();
    const int64_t begin = panel * columns, count = smaller(p.inputs - begin, columns);
    for (int64_t m = first; m < last; ++m, to += 2 * columns) {
        const T* from = p.x + m * p.inputs + begin;
        T padded[columns] = {};
        if (count < columns) from = copy(from, count, padded);
        CREDO_UNROLL
        for (int v = 0; v < vectors; ++v) {
            const auto x = S::load(from + v * S::width);
            S::store(to + v * S::width, x);
            S::store(to + columns + v * S::width, x * x);
        }
    }
}

// Adds a block of examples to a tile of sums, [row][column of total, then of squares].
template <typename T>
void multiply(const T* panel, const T* strip, int64_t examples, T* tile) {
    typedef Simd<T> S;
    constexpr int width = S::width, columns = vectors * width;
    typename S::Vector total[rows][vectors], squares[rows][vectors];
    CREDO_UNROLL
    for (int r = 0; r < rows; ++r)
        CREDO_UNROLL
        for (int v = 0; v < vectors; ++v) {
            total[r][v] = S::load(tile + (2 * r) * columns + v * width);
            squares[r][v] = S::load(tile + (2 * r + 1) * columns + v * width);
        }
    for (int64_t m = 0; m < examples; ++m, panel += 2 * columns, strip += 2 * rows) {
        typename S::Vector x[vectors], q[vectors];
        CREDO_UNROLL
        for (int v = 0; v < vectors; ++v) {
            x[v] = S::load(panel + v * width);
            q[v] = S::load(panel + columns + v * width);
        }
        CREDO_UNROLL
        for (int r = 0; r < rows; ++r)
            CREDO_UNROLL
            for (int v = 0; v < vectors; ++v) {
                total[r][v] += strip[r] * x[v];
                squares[r][v] += strip[rows + r] * q[v];
            }
    }
    CREDO_UNROLL
    for (int r = 0; r < rows; ++r)
        CREDO_UNROLL
        for (int v = 0; v < vectors; ++v) {
            S::store(tile + (2 * r) * columns + v * width, total[r][v]);
            S::store(tile + (2 * r + 1) * columns + v * width, squares[r][v]);
        }
}

// One panel of inputs against all strips of outputs.
template <typename T>
void sum_panel(const Problem<T>& p, int64_t panel, const T* strips, T* packed) {
    constexpr int64_t columns = Problem<T>::columns();
    const int64_t begin = panel * columns, count = smaller(p.inputs - begin, columns);
    for (int64_t first = 0; first < p.examples; first += block) {
        const int64_t last = smaller(p.examples, first + block);
        pack_panel(p, panel, first, last, packed);
        for (int64_t strip = 0; strip < p.strips(); ++strip) {
            T tile[rows][2][columns];
            const int64_t o = strip * rows, kept = smaller(p.outputs - o, rows);
            T* const to = p.total + o * p.inputs + begin;
            T* const to_squares = p.squares + o * p.inputs + begin;
            for (int64_t r = 0; r < rows; ++r)
                for (int64_t c = 0; c < columns; ++c) {
                    const bool known = first > 0 && r < kept && c < count;
                    tile[r][0][c] = known ? to[r * p.inputs + c] : T(0);
                    tile[r][1][c] = known ? to_squares[r * p.inputs + c] : T(0);
                }
            multiply(packed, strips + (strip * p.examples + first) * 2 * rows, last - first, &tile[0][0][0]);
            for (int64_t r = 0; r < kept; ++r) {
                copy(tile[r][0], count, to + r * p.inputs);
                copy(tile[r][1], count, to_squares + r * p.inputs);
            }
        }
    }
}

// Without `scratch`: the bytes of it that are needed. The arithmetic of an element does not depend on the threads.
template <typename T>
int64_t row_sums(const Problem<T>& p, T* scratch, int64_t threads) {
    const int64_t panel_size = block * 2 * Problem<T>::columns(), strip_size = p.examples * 2 * rows;
    if (!scratch) return (p.strips() * strip_size + threads * panel_size) * int64_t(sizeof(T));
    if (p.examples * p.inputs * p.outputs < small) threads = 1;
    T* panels = scratch + p.strips() * strip_size;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for schedule(static)
        for (int64_t strip = 0; strip < p.strips(); ++strip) pack_strip(p, strip, scratch + strip * strip_size);
#pragma omp for schedule(static)
        for (int64_t panel = 0; panel < p.panels(); ++panel)
            sum_panel(p, panel, scratch, panels + thread_number() * panel_size);
    }
    return 0;
}

template <typename T>
int64_t run(T* const* at, const int64_t* sizes, int64_t threads) {
    return row_sums<T>({at[0], at[1], sizes[0], sizes[1], sizes[2], at[2], at[3], at[4], at[5]}, at[6], threads);
}

}  // namespace

// at: x (M, I), g (M, O), total and squares (O, I), bias_total and bias_squares (O) or null, scratch or null.
CREDO_EXPORT(row_sums_f32)(float* const* at, const int64_t* sizes, int64_t threads) { return run(at, sizes, threads); }
CREDO_EXPORT(row_sums_f64)(double* const* at, const int64_t* sizes, int64_t threads) { return run(at, sizes, threads); }
