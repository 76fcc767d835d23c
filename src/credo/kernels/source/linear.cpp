// Both sums of a linear layer's per-example gradients in one pass, one position an example:
//
//     total[o, i] = Σ_m g[m, o] x[m, i]        squares[o, i] = Σ_m g[m, o]² x[m, i]²
//
// and those of its bias, Σ_m g[m, o] and Σ_m g[m, o]². Two matrix products as one: x and x² lie side by side as a
// pair, g and g² do too, and so do the two sums. A tile of sums, some outputs by some vectors of pairs, stays in
// registers; each pair of g, repeated to fill a vector, meets every vector of x.
//
// Where several samples of the weights see one input, g[s, m, o], their gradients are added up while they are packed,
// and so are their squares: Σ_s g[s, m, o] and Σ_s g[s, m, o]² meet x[m, i] and x[m, i]² once.
#include "pairs.h"

namespace {

constexpr int most_rows = 6, most_vectors = registers == 32 ? 4 : 2;  // of a tile: they leave registers for x and g
constexpr int64_t most_examples = registers == 32 ? 128 : 256;  // of a block: its panel stays in the first cache
constexpr int64_t ahead = 16;           // examples from asking for inputs to packing them: time enough to arrive
constexpr int64_t even = 32;            // vectors for each thread that divide well enough
constexpr int64_t small = 1 << 18;      // multiplications: below this a second thread is not worth waking

CREDO_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr CREDO_INLINE int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Range {
    int64_t first, last;

    int64_t size() const { return last - first; }
    Range part(int64_t number, int64_t of) const {
        return {first + size() * number / of, first + size() * (number + 1) / of};
    }
};

template <typename T>
struct Problem {
    const T *x, *g;
    int64_t samples, examples, inputs, outputs;
    T *total, *squares, *bias_total, *bias_squares;

    int64_t vectors() const { return divide_up(inputs, Pairs<T>::count); }
};

// A block of examples and the sums of some outputs by some inputs that it adds to, or begins.
template <typename T>
struct Tile {
    const T* x;
    T* panel;    // the same as pairs, vector after vector
    const T* g;  // as pairs, those of one example after those of another
    T *total, *squares;
    int64_t examples, inputs;
    int64_t tail;  // how many inputs the last two vectors of pairs stand for, or the last one of an odd number
    bool begins;
};

// How many inputs the vectors v and v + 1 stand for.
template <int vectors, typename T>
CREDO_INLINE int64_t inputs_of(int v, const Tile<T>& tile) {
    return v + 2 < vectors ? Simd<T>::width : tile.tail;
}

template <typename T, int vectors>
CREDO_INLINE void pack(const Tile<T>& tile, const T* from, typename Simd<T>::Vector (&x)[vectors]) {
    using P = Pairs<T>;
    CREDO_UNROLL
    for (int v = 0; v < vectors; v += 2) {
        const auto numbers = Simd<T>::load(from + v * Pairs<T>::count, inputs_of<vectors>(v, tile));
        // A vector by itself stands for half of the numbers, in order; of two together each may have any of them.
        const auto both = v + 1 == vectors ? P::template of<Order::whole>(numbers, numbers * numbers)
                                           : P::template of<Order::nearby>(numbers, numbers * numbers);
        x[v] = both.first;
        if (v + 1 < vectors) x[v + 1] = both.second;
        __builtin_prefetch(from + ahead * tile.inputs + v * Pairs<T>::count);
    }
}

template <typename T>
CREDO_INLINE void add(T* to, typename Simd<T>::Vector v, int64_t count, bool begins) {
    Simd<T>::store(to, begins ? v : v + Simd<T>::load(to, count), count);
}

template <typename T, int rows, int vectors>
CREDO_INLINE void unpack(const Tile<T>& tile, const typename Simd<T>::Vector (&sums)[rows][vectors]) {
    using P = Pairs<T>;
    constexpr Order whole = Order::whole, nearby = Order::nearby;
    CREDO_UNROLL
    for (int r = 0; r < rows; ++r)
        CREDO_UNROLL
        for (int v = 0; v < vectors; v += 2) {
            const int64_t at = r * tile.inputs + v * P::count, count = inputs_of<vectors>(v, tile);
            const bool alone = v + 1 == vectors;
            const P both = {sums[r][v], alone ? typename Simd<T>::Vector{} : sums[r][v + 1]};
            add(tile.total + at, alone ? both.template a<whole>() : both.template a<nearby>(), count, tile.begins);
            add(tile.squares + at, alone ? both.template b<whole>() : both.template b<nearby>(), count, tile.begins);
        }
}

// With `packs`, x is packed first, and left in the panel for the tiles that follow: its way from memory hides behind
// the arithmetic of this one.
template <typename T, int rows, int vectors, bool packs>
void multiply(const Tile<T>& tile) {
    using S = Simd<T>;
    typename S::Vector sums[rows][vectors], x[vectors];
    CREDO_UNROLL
    for (int r = 0; r < rows; ++r)
        CREDO_UNROLL
        for (int v = 0; v < vectors; ++v) sums[r][v] = typename S::Vector{};
    T* panel = tile.panel;
    for (int64_t m = 0; m < tile.examples; ++m, panel += vectors * S::width) {
        if constexpr (packs) pack(tile, tile.x + m * tile.inputs, x);
        CREDO_UNROLL
        for (int v = 0; v < vectors; ++v)
            if constexpr (packs)
                S::store(panel + v * S::width, x[v]);
            else
                x[v] = S::load(panel + v * S::width);
        CREDO_UNROLL
        for (int r = 0; r < rows; ++r)
            CREDO_UNROLL
            for (int v = 0; v < vectors; ++v) sums[r][v] += repeated_pair(tile.g + 2 * (m * rows + r)) * x[v];
    }
    unpack(tile, sums);
}

template <typename T>
using Multiply = void (*)(const Tile<T>&);

template <typename T, int... i>
Multiply<T> pick(int64_t rows, int64_t vectors, bool packs, std::integer_sequence<int, i...>) {
    static constexpr Multiply<T> table[] = {
        multiply<T, i / 2 / most_vectors + 1, i / 2 % most_vectors + 1, i % 2 == 1>...};
    return table[((rows - 1) * most_vectors + vectors - 1) * 2 + packs];
}

// What one thread does: some vectors of inputs against some outputs. It packs for itself alone: a copy that another
// core has just written is slower to read than to make.
template <typename T>
struct Share {
    using S = Simd<T>;
    static constexpr int width = S::width;

    const Problem<T>& p;
    const Range vectors, outputs;
    T* const scratch;  // a panel of inputs, and the gradients of a block

    static constexpr int64_t panel_size() { return most_examples * most_vectors * width; }
    static constexpr int64_t strip_size() { return most_examples * most_rows * 2; }
    // Whole vectors are written, the last of a strip beyond its end.
    static constexpr int64_t scratch_size(int64_t outputs) {
        return panel_size() + divide_up(outputs, most_rows) * strip_size() + 2 * width;
    }

    int64_t strips() const { return divide_up(outputs.size(), most_rows); }
    T* strip(int64_t number) const { return scratch + panel_size() + number * strip_size(); }

    void run() const {
        const int64_t blocks = divide_up(p.examples, most_examples), panels = divide_up(vectors.size(), most_vectors);
        for (int64_t b = 0; b < blocks; ++b) {
            const Range block = Range{0, p.examples}.part(b, blocks);
            for (int64_t s = 0; s < strips(); ++s) pack_gradients(block, outputs.part(s, strips()), strip(s));
            for (int64_t n = 0; n < panels; ++n) sum(block, vectors.part(n, panels));
        }
    }

    // A strip as pairs, [example][output]; what whole vectors write too much, those of the next example write over.
    // The sums of the bias are on the way, for one of those who share the outputs.
    void pack_gradients(Range block, Range rows, T* to) const {
        constexpr int most = divide_up(most_rows, width);
        typename S::Vector bias_total[most] = {}, bias_squares[most] = {};
        for (int64_t m = block.first; m < block.last; ++m, to += 2 * rows.size()) {
            for (int v = 0; v < most && v * width < rows.size(); ++v) {
                typename S::Vector total = {}, squares = {};
                const int64_t o = rows.first + v * width, count = smaller(width, rows.last - o);
                for (int64_t s = 0; s < p.samples; ++s) {
                    const auto g = S::load(p.g + (s * p.examples + m) * p.outputs + o, count);
                    total += g;
                    squares += g * g;
                }
                const auto both = Pairs<T>::template of<Order::whole>(total, squares);
                S::store(to + 2 * v * width, both.first);
                S::store(to + 2 * v * width + width, both.second);
                bias_total[v] += total;
                bias_squares[v] += squares;
            }
        }
        if (vectors.first > 0) return;
        for (int v = 0; v < most && v * width < rows.size(); ++v) {
            const int64_t o = rows.first + v * width, count = smaller(width, rows.last - o);
            add(p.bias_total + o, bias_total[v], count, block.first == 0);
            add(p.bias_squares + o, bias_squares[v], count, block.first == 0);
        }
    }

    // One panel of inputs against strips of outputs, the first of which packs it.
    void sum(Range block, Range panel) const {
        const int64_t left = panel.first * Pairs<T>::count, before_tail = (panel.size() - 1) / 2 * width;
        const int64_t tail = smaller(panel.size() * Pairs<T>::count, p.inputs - left) - before_tail;
        const T* const x = p.x + block.first * p.inputs + left;
        for (int64_t s = 0; s < strips(); ++s) {
            const Range rows = outputs.part(s, strips());
            const int64_t at = rows.first * p.inputs + left;
            const Tile<T> tile = {x, scratch, strip(s), p.total + at, p.squares + at, block.size(), p.inputs, tail,
                                  block.first == 0};
            constexpr auto shapes = std::make_integer_sequence<int, 2 * most_rows * most_vectors>();
            pick<T>(rows.size(), panel.size(), s == 0, shapes)(tile);
        }
    }
};

// Without `scratch`: the bytes of it that are needed. Threads share the inputs where there are enough to be even, so
// that each is packed once; else the outputs. The arithmetic of an element does not depend on the threads.
template <typename T>
int64_t row_sums(const Problem<T>& p, T* scratch, int64_t threads) {
    if (p.examples * p.inputs * p.outputs < small) threads = 1;
    const bool by_input = p.vectors() >= even * threads;
    const int64_t each = Share<T>::scratch_size(by_input ? p.outputs : divide_up(p.outputs, threads));
    if (!scratch) return threads * each * int64_t(sizeof(T));
    const Range vectors = {0, p.vectors()}, outputs = {0, p.outputs};
#pragma omp parallel for num_threads(threads) schedule(static, 1) if (threads > 1)
    for (int64_t part = 0; part < threads; ++part) {
        T* const own = scratch + part * each;
        if (by_input)
            Share<T>{p, vectors.part(part, threads), outputs, own}.run();
        else
            Share<T>{p, vectors, outputs.part(part, threads), own}.run();
    }
    return 0;
}

template <typename T>
int64_t run(T* const* at, const int64_t* sizes, int64_t threads) {
    const Problem<T> problem = {at[0], at[1], sizes[0], sizes[1], sizes[2], sizes[3], at[2], at[3], at[4], at[5]};
    return row_sums<T>(problem, at[6], threads);
}

}  // namespace

// at: x (M, I), g (S, M, O), total and squares (O, I), bias_total and bias_squares (O), scratch or null.
// sizes: S, M, I, O.
CREDO_EXPORT(row_sums_f32)(float* const* at, const int64_t* sizes, int64_t threads) { return run(at, sizes, threads); }
CREDO_EXPORT(row_sums_f64)(double* const* at, const int64_t* sizes, int64_t threads) { return run(at, sizes, threads); }
