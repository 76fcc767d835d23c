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
constexpr int lanes = registers == 32 ? 8 : 4;  // the rows of a strip, filled up to a vector's length
constexpr int64_t block = 128;                 // examples in a packed panel: with a strip it stays in the first cache
constexpr int64_t even = 8;                    // panels for each thread that divide well enough
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

// The gradients of one strip of outputs as [example][g of each row, then g² of each row], `lanes` apart. What stands
// where there is no row is never used: it belongs to the next output or the next example, and only the last example,
// or a strip at the edge, has to be copied not to read beyond the end. `sums_bias`: its sums are this thread's to write.
template <typename T>
void pack_strip(const Problem<T>& p, int64_t strip, bool sums_bias, T* to) {
    typedef T Vector __attribute__((vector_size(lanes * sizeof(T)), aligned(sizeof(T)), may_alias));
    const int64_t begin = strip * rows, kept = smaller(p.outputs - begin, rows);
    Vector sums = {}, sums_of_squares = {};
    for (int64_t m = 0; m < p.examples; ++m, to += 2 * lanes) {
        const T* from = p.g + m * p.outputs + begin;
        T last[lanes] = {};
        if (m == p.examples - 1 || kept < rows) from = copy(from, kept, last);
        const Vector g = *reinterpret_cast<const Vector*>(from), squares = g * g;
        *reinterpret_cast<Vector*>(to) = g;
        *reinterpret_cast<Vector*>(to + lanes) = squares;
        sums += g;
        sums_of_squares += squares;
    }
    if (!p.bias_total || !sums_bias) return;
    copy(reinterpret_cast<const T*>(&sums), kept, p.bias_total + begin);
    copy(reinterpret_cast<const T*>(&sums_of_squares), kept, p.bias_squares + begin);
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

// One tile of sums, `rows` outputs by `vectors` vectors of inputs; its rows lie `stride` apart.
template <typename T>
struct Tile {
    T *total, *squares;
    int64_t stride;
};

// Adds a block of examples to a tile, or begins it; `used` of a panel's vectors are not empty.
template <int used = vectors, typename T>
void multiply(const T* panel, const T* strip, int64_t examples, Tile<T> tile, bool begins) {
    typedef Simd<T> S;
    constexpr int width = S::width, columns = vectors * width;
    typename S::Vector total[rows][used], squares[rows][used];
    CREDO_UNROLL
    for (int r = 0; r < rows; ++r)
        CREDO_UNROLL
        for (int v = 0; v < used; ++v) {
            const int64_t at = r * tile.stride + v * width;
            total[r][v] = begins ? typename S::Vector{} : S::load(tile.total + at);
            squares[r][v] = begins ? typename S::Vector{} : S::load(tile.squares + at);
        }
    for (int64_t m = 0; m < examples; ++m, panel += 2 * columns, strip += 2 * lanes) {
        typename S::Vector x[used], q[used];
        CREDO_UNROLL
        for (int v = 0; v < used; ++v) {
            x[v] = S::load(panel + v * width);
            q[v] = S::load(panel + columns + v * width);
        }
        CREDO_UNROLL
        for (int r = 0; r < rows; ++r)
            CREDO_UNROLL
            for (int v = 0; v < used; ++v) {
                total[r][v] += strip[r] * x[v];
                squares[r][v] += strip[lanes + r] * q[v];
            }
    }
    CREDO_UNROLL
    for (int r = 0; r < rows; ++r)
        CREDO_UNROLL
        for (int v = 0; v < used; ++v) {
            const int64_t at = r * tile.stride + v * width;
            S::store(tile.total + at, total[r][v]);
            S::store(tile.squares + at, squares[r][v]);
        }
}

// `multiply` for a tile that reaches over the edge of the sums: on a copy, of which what exists is kept.
template <typename T>
void multiply_at_edge(const T* panel, const T* strip, int64_t examples, Tile<T> tile, bool begins, int64_t kept,
                      int64_t count) {
    constexpr int64_t columns = Problem<T>::columns();
    T total[rows][columns] = {}, squares[rows][columns] = {};
    for (int64_t r = 0; r < kept && !begins; ++r) {
        copy(tile.total + r * tile.stride, count, total[r]);
        copy(tile.squares + r * tile.stride, count, squares[r]);
    }
    const auto add = count > Simd<T>::width ? multiply<vectors, T> : multiply<1, T>;
    add(panel, strip, examples, {total[0], squares[0], columns}, begins);
    for (int64_t r = 0; r < kept; ++r) {
        copy(total[r], count, tile.total + r * tile.stride);
        copy(squares[r], count, tile.squares + r * tile.stride);
    }
}

// What one thread does: some panels of inputs against some strips of outputs. It packs for itself alone: a copy that
// another core has just written is slower to read than to make.
template <typename T>
struct Share {
    const Problem<T>& p;
    int64_t first_panel, last_panel, first_strip, last_strip;
    T *strips, *panel;

    int64_t strip_size() const { return p.examples * 2 * lanes; }

    void run() const {
        for (int64_t strip = first_strip; strip < last_strip; ++strip)
            pack_strip(p, strip, first_panel == 0, strips + (strip - first_strip) * strip_size());
        for (int64_t number = first_panel; number < last_panel; ++number)
            for (int64_t first = 0; first < p.examples; first += block)
                sum(number, first, smaller(p.examples, first + block));
    }

    // The examples [first, last) of one panel of inputs against this share's strips of outputs.
    void sum(int64_t number, int64_t first, int64_t last) const {
        constexpr int64_t columns = Problem<T>::columns();
        const int64_t left = number * columns, count = smaller(p.inputs - left, columns);
        pack_panel(p, number, first, last, panel);
        for (int64_t strip = first_strip; strip < last_strip; ++strip) {
            const T* const gradients = strips + (strip - first_strip) * strip_size() + first * 2 * lanes;
            const int64_t at = strip * rows * p.inputs + left, kept = smaller(p.outputs - strip * rows, rows);
            const Tile<T> tile = {p.total + at, p.squares + at, p.inputs};
            if (kept == rows && count == columns)
                multiply(panel, gradients, last - first, tile, first == 0);
            else
                multiply_at_edge(panel, gradients, last - first, tile, first == 0, kept, count);
        }
    }
};

// Without `scratch`: the bytes of it that are needed. Threads share the panels where there are enough to be even, so
// that each input is packed once; else the strips. The arithmetic of an element does not depend on the threads.
template <typename T>
int64_t row_sums(const Problem<T>& p, T* scratch, int64_t threads) {
    if (p.examples * p.inputs * p.outputs < small) threads = 1;
    const int64_t panels = p.panels(), strips = p.strips(), by_panel = panels >= even * threads;
    const int64_t panel_size = block * 2 * Problem<T>::columns(), strips_each = by_panel ? strips : strips / threads + 1;
    const int64_t each = panel_size + strips_each * p.examples * 2 * lanes;
    if (!scratch) return threads * each * int64_t(sizeof(T));
#pragma omp parallel for num_threads(threads) schedule(static, 1) if (threads > 1)
    for (int64_t part = 0; part < threads; ++part) {
        const auto cut = [&](int64_t whole, int64_t end) { return whole * (part + end) / threads; };
        T* const own = scratch + part * each;
        if (by_panel)
            Share<T>{p, cut(panels, 0), cut(panels, 1), 0, strips, own + panel_size, own}.run();
        else
            Share<T>{p, 0, panels, cut(strips, 0), cut(strips, 1), own + panel_size, own}.run();
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
