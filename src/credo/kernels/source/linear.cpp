// Both sums of a linear layer's per-example gradients in one pass, one position an example:
//
//     total[o, i] = Σ_m g[m, o] x[m, i]        squares[o, i] = Σ_m g[m, o]² x[m, i]²
//
// and those of its bias, Σ_m g[m, o] and Σ_m g[m, o]². Two matrix products with one set of loads: a tile of `rows`
// outputs by two vectors of inputs keeps both sums in registers. The inputs of a panel are packed with their squares
// beside them, and so are the gradients, so that the inner loop does nothing but multiply and add.
//
// Where several samples of the weights see one input, g[s, m, o], their gradients are added up while they are packed,
// and so are their squares: Σ_s g[s, m, o] and Σ_s g[s, m, o]² meet x[m, i] and x[m, i]² once.
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
    int64_t samples, examples, inputs, outputs;
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

// The packed gradients of `rows` outputs, those of one example `pitch` after those of the one before.
template <typename T>
struct Strip {
    const T* at;
    int64_t pitch;
};

// Adds a block of examples to a tile, or begins it; `used` of a panel's vectors are not empty.
template <int used = vectors, typename T>
void multiply(const T* panel, Strip<T> strip, int64_t examples, Tile<T> tile, bool begins) {
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
    for (int64_t m = 0; m < examples; ++m, panel += 2 * columns, strip.at += strip.pitch) {
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
                total[r][v] += strip.at[r] * x[v];
                squares[r][v] += strip.at[lanes + r] * q[v];
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
void multiply_at_edge(const T* panel, Strip<T> strip, int64_t examples, Tile<T> tile, bool begins, int64_t kept,
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
    typedef T Lanes __attribute__((vector_size(lanes * sizeof(T)), aligned(sizeof(T)), may_alias));

    const Problem<T> p;
    const int64_t first_panel, last_panel, first_strip, last_strip;
    const int64_t pitch;  // from one example to the next: an odd number of strips, so that they fall on different sets
    T *const panel, *const bias, *const packed;

    Share(const Problem<T>& p, int64_t first_panel, int64_t last_panel, int64_t first_strip, int64_t last_strip, T* own)
        : p(p),
          first_panel(first_panel),
          last_panel(last_panel),
          first_strip(first_strip),
          last_strip(last_strip),
          pitch(pitch_of(last_strip - first_strip)),
          panel(own),
          bias(panel + panel_size()),
          packed(bias + pitch) {}

    static constexpr int64_t panel_size() { return block * 2 * Problem<T>::columns(); }
    static constexpr int64_t pitch_of(int64_t strips) { return (strips | 1) * 2 * lanes; }
    static constexpr int64_t scratch_size(int64_t strips) { return panel_size() + (block + 1) * pitch_of(strips); }

    int64_t kept(int64_t strip) const { return smaller(p.outputs - strip * rows, rows); }

    // A block of examples at a time, so that what is packed of it stays in the second cache.
    void run() const {
        for (int64_t first = 0; first < p.examples; first += block) {
            const int64_t last = smaller(p.examples, first + block);
            for (int64_t m = first; m < last; ++m) pack_gradients(m, packed + (m - first) * pitch);
            for (int64_t number = first_panel; number < last_panel; ++number) sum(number, first, last);
        }
        if (p.bias_total && first_panel == 0) write_bias();
    }

    // The gradients of one example as [strip][g of each row, then g² of each row], `lanes` apart. What stands where
    // there is no row is never used: it belongs to the next output or the next example, and only the last example, or
    // a strip at the edge, has to be copied not to read beyond the end. Beside it, the sums over examples so far.
    void pack_gradients(int64_t m, T* to) const {
        const T* const from = p.g + m * p.outputs;
        const int64_t whole = m == p.examples - 1 ? first_strip : smaller(last_strip, p.outputs / rows);
        T* sums = bias;
        for (int64_t strip = first_strip; strip < last_strip; ++strip, to += 2 * lanes, sums += 2 * lanes)
            if (strip < whole)
                pack_strip<false>(from + strip * rows, rows, to, sums, m);
            else
                pack_strip<true>(from + strip * rows, kept(strip), to, sums, m);
    }

    template <bool at_edge>
    CREDO_INLINE void pack_strip(const T* from, int64_t count, T* to, T* sums, bool adds) const {
        Lanes total = {}, squares = {};
        const int64_t stride = p.examples * p.outputs;
        for (const T* const end = from + p.samples * stride; from != end; from += stride) {
            T edge[lanes] = {};
            const Lanes g = *reinterpret_cast<const Lanes*>(at_edge ? copy(from, count, edge) : from);
            total += g;
            squares += g * g;
        }
        store(to, total, squares, false);
        store(sums, total, squares, adds);
    }

    static CREDO_INLINE void store(T* to, Lanes total, Lanes squares, bool adds) {
        Lanes* const at = reinterpret_cast<Lanes*>(to);
        at[0] = adds ? at[0] + total : total;
        at[1] = adds ? at[1] + squares : squares;
    }

    void write_bias() const {
        for (int64_t strip = first_strip; strip < last_strip; ++strip) {
            const T* const sums = bias + (strip - first_strip) * 2 * lanes;
            copy(sums, kept(strip), p.bias_total + strip * rows);
            copy(sums + lanes, kept(strip), p.bias_squares + strip * rows);
        }
    }

    // The examples [first, last) of one panel of inputs against this share's strips of outputs.
    void sum(int64_t number, int64_t first, int64_t last) const {
        constexpr int64_t columns = Problem<T>::columns();
        const int64_t left = number * columns, count = smaller(p.inputs - left, columns);
        pack_panel(p, number, first, last, panel);
        for (int64_t strip = first_strip; strip < last_strip; ++strip) {
            const int64_t at = strip * rows * p.inputs + left;
            const Tile<T> tile = {p.total + at, p.squares + at, p.inputs};
            const Strip<T> gradients = {packed + (strip - first_strip) * 2 * lanes, pitch};
            if (kept(strip) == rows && count == columns)
                multiply(panel, gradients, last - first, tile, first == 0);
            else
                multiply_at_edge(panel, gradients, last - first, tile, first == 0, kept(strip), count);
        }
    }
};

// Without `scratch`: the bytes of it that are needed. Threads share the panels where there are enough to be even, so
// that each input is packed once; else the strips. The arithmetic of an element does not depend on the threads.
template <typename T>
int64_t row_sums(const Problem<T>& p, T* scratch, int64_t threads) {
    if (p.examples * p.inputs * p.outputs < small) threads = 1;
    const int64_t panels = p.panels(), strips = p.strips(), by_panel = panels >= even * threads;
    const int64_t each = Share<T>::scratch_size(by_panel ? strips : strips / threads + 1);
    if (!scratch) return threads * each * int64_t(sizeof(T));
#pragma omp parallel for num_threads(threads) schedule(static, 1) if (threads > 1)
    for (int64_t part = 0; part < threads; ++part) {
        const auto cut = [&](int64_t whole, int64_t end) { return whole * (part + end) / threads; };
        T* const own = scratch + part * each;
        if (by_panel)
            Share<T>(p, cut(panels, 0), cut(panels, 1), 0, strips, own).run();
        else
            Share<T>(p, 0, panels, cut(strips, 0), cut(strips, 1), own).run();
    }
    return 0;
}

template <typename T>
int64_t run(T* const* at, const int64_t* sizes, int64_t threads) {
    const Problem<T> problem = {at[0], at[1], sizes[0], sizes[1], sizes[2], sizes[3], at[2], at[3], at[4], at[5]};
    return row_sums<T>(problem, at[6], threads);
}

}  // namespace

// at: x (M, I), g (S, M, O), total and squares (O, I), bias_total and bias_squares (O) or null, scratch or null.
// sizes: S, M, I, O.
CREDO_EXPORT(row_sums_f32)(float* const* at, const int64_t* sizes, int64_t threads) { return run(at, sizes, threads); }
CREDO_EXPORT(row_sums_f64)(double* const* at, const int64_t* sizes, int64_t threads) { return run(at, sizes, threads); }
