// Σᵢrᵢ and Σᵢrᵢ² of a convolution's weight, rᵢ[o, c, k] = Σ_p g[o, p] · x[c, stride·p + dilation·k − padding].
//
// A tap k is a product of two matrices over the places p: x moved by k, and g. Neither is unfolded: the inner loop
// walks through x in steps of the stride, over the places where the tap is inside the image and nowhere else. One of
// x and g gives the scalars ("left") and the other the vectors ("right"), whichever way wastes fewer lanes. With few
// input channels, the taps along a row are channels too ("runs"): they are adjacent in a channels-last image.
#include "pack.h"
#include "tile.h"

namespace {

struct Geometry {  // as `numbers` in convolution.py writes it
    int64_t examples, channels, outputs, groups;
    int64_t size[3], places[3], kernel[3], stride[3], padding[3], dilation[3];
    Strides x, g;
};

int64_t product(const int64_t n[3]) { return n[0] * n[1] * n[2]; }
int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// How one of x and g lies in memory when the inner loop reads it, packed or as it came.
struct Operand {
    bool packed;
    int64_t width, count;            // channels of a block (a tile's rows or a vector's lanes), blocks
    int64_t block, example, pitch;   // elements from one block, example and place to the next
};

template <typename T>
class Convolution {
    static constexpr int64_t width = Simd<T>::width;
    static constexpr int64_t chunk_places = 4096;    // of a chunk of examples: near what the L2 cache holds
    static constexpr int64_t chunk_bytes = 12 << 20;  // and never more memory than this
    static constexpr int64_t l2_bytes = 3 << 19;
    static constexpr int64_t slice_bytes = 4 << 20;
    static constexpr int64_t adjacent_channels = 48;  // beyond, places of an unpacked image fall on the same cache sets

    Geometry at;       // of one group, as the inner loop sees it
    Geometry given;    // as it came
    bool runs, swapped;
    Operand x, g;
    int64_t tap_count, taps_per_job, vectors, chunk, slices;

   public:
    explicit Convolution(const Geometry& all) : at(all), given(all) {
        at.channels /= at.groups;
        at.outputs /= at.groups;
        given = at;
        flatten();
        choose_runs();
        choose_sides();
        tap_count = product(at.kernel);
        choose_chunks();
    }

    int64_t scratch(int threads) const {
        const int64_t elements = sliced() ? threads * packed_elements() + slices * 2 * weights() : packed_elements();
        return sizeof(T) * larger(1, elements);
    }

    void run(const T* x_from, const T* g_from, T* total, T* squares, T* scratch, int threads) const {
        if (sliced())
            run_slices(x_from, g_from, total, squares, scratch, threads);
        else
            for (int64_t group = 0; group < at.groups; ++group)
                run_tiles(x_from, g_from, total, squares, scratch, group, threads);
    }

   private:
    // A kernel of one tap that visits every place: all places are one row.
    void flatten() {
        for (int d = 0; d < 3; ++d)
            if (at.kernel[d] != 1 || at.stride[d] != 1 || at.padding[d] != 0 || at.size[d] != at.places[d]) return;
        at.size[2] = at.places[2] = product(at.places);
        at.size[0] = at.size[1] = at.places[0] = at.places[1] = 1;
        given = at;
    }

    // With few channels, all taps of a row of the kernel become channels of an image that is padded beforehand.
    void choose_runs() {
        runs = at.channels < 12 && at.kernel[2] > 1 && at.dilation[2] == 1;
        if (!runs) return;
        at.size[2] += 2 * at.padding[2];
        at.padding[2] = 0;
        at.channels *= at.kernel[2];
        at.kernel[2] = 1;
    }

    void choose_sides() {
        swapped = at.outputs * divide_up(at.channels, width) * 5 < at.channels * divide_up(at.outputs, width) * 4;
        const int64_t columns = divide_up(swapped ? at.channels : at.outputs, width);
        const int64_t rows = swapped ? at.outputs : at.channels;
        vectors = smaller(columns, most_vectors);
        const int64_t most = vectors == 1 ? most_rows : most_rows_wide;
        const int64_t height = divide_up(rows, divide_up(rows, most));  // tiles of equal height
        x = operand(at.channels, swapped ? width : height, given.x, product(at.size), swapped);
        g = operand(at.outputs, swapped ? height : width, given.g, product(at.places), !swapped);
        if (runs) x = Operand{true, x.width, x.count, x.width, product(at.size) * given.channels, given.channels};
        taps_per_job = larger(1, sums_bytes / int64_t(2 * height * vectors * width * sizeof(T)));
        taps_per_job = divide_up(product(at.kernel), divide_up(product(at.kernel), taps_per_job));
    }

    static Operand operand(int64_t channels, int64_t block, const Strides& s, int64_t places, bool as_vectors) {
        const int64_t count = divide_up(channels, block);
        const bool whole = !as_vectors || channels % block == 0;  // a vector must not reach past the last channel
        if (s.channel == 1 && s.place <= adjacent_channels && whole)
            return Operand{false, block, count, block, s.example, s.place};
        const int64_t pitch = block < width ? block : divide_up(block, width) * width;
        return Operand{true, block, count, 0, places * pitch, pitch};
    }

    void choose_chunks() {
        const int64_t places = product(at.places), packed = larger(1, sizeof(T) * packed_elements_of(1));
        const int64_t read = sizeof(T) * (given.channels * product(at.size) + at.outputs * places);
        slices = smaller(smaller(at.examples, divide_up(16, at.groups)), larger(1, at.examples * places / chunk_places));
        const int64_t most = sliced() ? divide_up(at.examples, slices) : at.examples;
        const int64_t wanted = smaller(most, larger(divide_up(2048, places), l2_bytes / read));
        chunk = larger(1, smaller(wanted, chunk_bytes / packed / (sliced() ? 2 : 1)));
        chunk = divide_up(most, divide_up(most, chunk));
        if (x.packed && !runs) x.block = chunk * x.example;
        if (g.packed) g.block = chunk * g.example;
    }

    int64_t weights() const { return at.outputs * at.channels * product(at.kernel) * at.groups; }

    // Small weights are summed over slices of the examples, whose number does not depend on the number of threads.
    bool sliced() const {
        return slices * at.groups >= 8 && slices * 2 * weights() * int64_t(sizeof(T)) <= slice_bytes;
    }

    int64_t packed_x(int64_t examples) const {
        if (runs) return examples * x.example + 2 * width;  // the last vector may look past the end
        return x.packed ? examples * x.example * x.count : 0;
    }
    int64_t packed_g(int64_t examples) const { return g.packed ? examples * g.example * g.count : 0; }
    int64_t packed_elements_of(int64_t examples) const { return packed_x(examples) + packed_g(examples); }
    int64_t packed_elements() const { return divide_up(packed_elements_of(chunk), 16) * 16; }

    void pack_x(const T* from, int64_t m, T* to) const {
        from += m * given.x.example;
        if (runs)
            return pack_padded(from, given.x, given.channels, given.size, given.padding[2], to + m * x.example);
        for (int64_t b = 0; x.packed && b < x.count; ++b)
            pack_block(from + b * x.width * given.x.channel, given.x, smaller(x.width, at.channels - b * x.width),
                       product(at.size), x.pitch, to + b * x.block + m * x.example);
    }

    void pack_g(const T* from, int64_t m, T* to) const {
        from += m * given.g.example;
        for (int64_t b = 0; g.packed && b < g.count; ++b)
            pack_block(from + b * g.width * given.g.channel, given.g, smaller(g.width, at.outputs - b * g.width),
                       product(at.places), g.pitch, to + b * g.block + m * g.example);
    }

    Steps x_steps() const {
        const int64_t row = at.size[2] * x.pitch;
        return Steps{x.example, at.stride[0] * at.size[1] * row, at.stride[1] * row, at.stride[2] * x.pitch};
    }
    Steps g_steps() const {
        const int64_t row = at.places[2] * g.pitch;
        return Steps{g.example, at.places[1] * row, row, g.pitch};
    }

    // The places where tap number k is inside the image.
    Tap tap(int64_t k) const {
        const int64_t taps[3] = {k / (at.kernel[1] * at.kernel[2]), k / at.kernel[2] % at.kernel[1], k % at.kernel[2]};
        int64_t first[3], count[3], from[3];
        for (int d = 0; d < 3; ++d) {
            const int64_t shift = taps[d] * at.dilation[d] - at.padding[d];
            first[d] = shift < 0 ? divide_up(-shift, at.stride[d]) : 0;
            const int64_t end = at.size[d] > shift ? (at.size[d] - 1 - shift) / at.stride[d] + 1 : 0;
            count[d] = larger(0, smaller(end, at.places[d]) - first[d]);
            from[d] = first[d] * at.stride[d] + shift;
        }
        const int64_t in_x = ((from[0] * at.size[1] + from[1]) * at.size[2] + from[2]) * x.pitch;
        const int64_t in_g = ((first[0] * at.places[1] + first[1]) * at.places[2] + first[2]) * g.pitch;
        return Tap{swapped ? in_g : in_x, swapped ? in_x : in_g, count[0], count[1], count[2]};
    }

    const Operand& left() const { return swapped ? g : x; }
    const Operand& right() const { return swapped ? x : g; }
    int64_t tap_jobs() const { return divide_up(tap_count, taps_per_job); }
    int64_t jobs() const { return left().count * divide_up(right().count, vectors) * tap_jobs(); }

    // One tile of the weight, over the examples of a chunk; `add` to what is there, or begin.
    void job(int64_t number, const T* x_at, const T* g_at, int64_t examples, bool add, T* total, T* squares) const {
        const int64_t first_tap = number % tap_jobs() * taps_per_job, rest = number / tap_jobs();
        const int64_t column = rest % divide_up(right().count, vectors) * vectors, row = rest / divide_up(right().count, vectors);
        const int64_t rows = smaller(left().width, (swapped ? at.outputs : at.channels) - row * left().width);
        const int64_t count = smaller(taps_per_job, tap_count - first_tap), wide = smaller(vectors, right().count - column);
        alignas(64) T sums[sums_bytes / sizeof(T)];
        memset(sums, 0, sizeof(T) * 2 * count * rows * wide * width);
        Tap taps[sums_bytes / (2 * Simd<T>::width * sizeof(T))];
        for (int64_t k = 0; k < count; ++k) taps[k] = tap(first_tap + k);
        const T *left_at = (swapped ? g_at : x_at) + row * left().block, *right_at = (swapped ? x_at : g_at) + column * right().block;
        sweep_of<T>(rows, wide)(Sweep<T>{left_at, right_at, swapped ? g_steps() : x_steps(), swapped ? x_steps() : g_steps(),
                                         right().block, examples, taps, count, sums});
        const int64_t lanes = smaller(wide * width, (swapped ? at.channels : at.outputs) - column * width);
        write(sums, rows, wide, lanes, row * left().width, column * width, first_tap, count, add, total, squares);
    }

    // From [tap][total, squares][row][lane] to the layout of the weight, [output][channel][tap].
    void write(const T* sums, int64_t rows, int64_t wide, int64_t lanes, int64_t row, int64_t column, int64_t first_tap,
               int64_t count, bool add, T* total, T* squares) const {
        const int64_t size = rows * wide * width;
        const int64_t outer = swapped ? rows : lanes, inner = swapped ? lanes : rows;
        for (int64_t i = 0; i < outer; ++i)
            for (int64_t j = 0; j < inner; ++j) {
                const int64_t r = swapped ? i : j, lane = swapped ? j : i;
                const int64_t output = (swapped ? row : column) + i, channel = (swapped ? column : row) + j;
                // In a run, channel number j is tap j / C of the row, and channel j % C.
                const int64_t c = runs ? channel % given.channels : channel, k = runs ? channel / given.channels : 0;
                const int64_t step = runs ? given.kernel[2] : 1;
                const int64_t to = (output * given.channels + c) * product(given.kernel) + k + first_tap * step;
                const T* from = sums + r * wide * width + lane;
                for (int64_t t = 0; t < count; ++t, from += 2 * size) {
                    total[to + t * step] = from[0] + (add ? total[to + t * step] : 0);
                    squares[to + t * step] = from[size] + (add ? squares[to + t * step] : 0);
                }
            }
    }

    // Large weights: threads share the packed examples and divide the tiles.
    void run_tiles(const T* x_from, const T* g_from, T* total, T* squares, T* scratch, int64_t group, int threads) const {
        x_from += group * given.channels * given.x.channel;
        g_from += group * given.outputs * given.g.channel;
        total += group * weights() / at.groups;
        squares += group * weights() / at.groups;
        T *x_packed = scratch, *g_packed = scratch + packed_x(chunk);
#pragma omp parallel num_threads(threads)
        for (int64_t m = 0; m < at.examples; m += chunk) {
            const int64_t examples = smaller(chunk, at.examples - m);
            const T *x_part = x_from + m * given.x.example, *g_part = g_from + m * given.g.example;
#pragma omp for schedule(dynamic)
            for (int64_t i = 0; i < examples; ++i) {
                pack_x(x_part, i, x_packed);
                pack_g(g_part, i, g_packed);
            }
#pragma omp for schedule(dynamic)
            for (int64_t j = 0; j < jobs(); ++j)
                job(j, x.packed ? x_packed : x_part, g.packed ? g_packed : g_part, examples, m > 0, total, squares);
        }
    }

    // Small weights: every thread packs and sums slices of the examples by itself, and the slices are added in order.
    void run_slices(const T* x_from, const T* g_from, T* total, T* squares, T* scratch, int threads) const {
        T* partial = scratch + threads * packed_elements();
        const int64_t all = weights(), own = all / at.groups, share = divide_up(at.examples, slices);
#pragma omp parallel num_threads(threads)
        {
#ifdef _OPENMP
            T* x_packed = scratch + omp_get_thread_num() * packed_elements();
#else
            T* x_packed = scratch;
#endif
            T* g_packed = x_packed + packed_x(chunk);
#pragma omp for schedule(dynamic)
            for (int64_t s = 0; s < slices * at.groups; ++s) {
                const int64_t slice = s % slices, group = s / slices, end = smaller(at.examples, (slice + 1) * share);
                T *sum = partial + 2 * slice * all + group * own, *sum_of_squares = sum + all;
                for (int64_t i = 0; slice * share >= end && i < own; ++i) sum[i] = sum_of_squares[i] = 0;
                for (int64_t m = slice * share; m < end; m += chunk) {
                    const int64_t examples = smaller(chunk, end - m);
                    const T* x_part = x_from + m * given.x.example + group * given.channels * given.x.channel;
                    const T* g_part = g_from + m * given.g.example + group * given.outputs * given.g.channel;
                    for (int64_t i = 0; i < examples; ++i) {
                        pack_x(x_part, i, x_packed);
                        pack_g(g_part, i, g_packed);
                    }
                    for (int64_t j = 0; j < jobs(); ++j)
                        job(j, x.packed ? x_packed : x_part, g.packed ? g_packed : g_part, examples, m > slice * share,
                            sum, sum_of_squares);
                }
            }
#pragma omp for
            for (int64_t i = 0; i < all; ++i) {
                T a = 0, b = 0;
                for (int64_t s = 0; s < slices; ++s) a += partial[2 * s * all + i], b += partial[(2 * s + 1) * all + i];
                total[i] = a;
                squares[i] = b;
            }
        }
    }
};

template <typename T>
int64_t convolution(const Geometry& at, const T* x, const T* g, T* total, T* squares, T* scratch, int threads) {
    const Convolution<T> work(at);
    if (!scratch) return work.scratch(threads);
    work.run(x, g, total, squares, scratch, threads);
    return 0;
}

}  // namespace

CREDO_EXPORT(convolution_f32)
(const int64_t* at, const float* x, const float* g, float* total, float* squares, float* scratch, int threads) {
    return convolution(*reinterpret_cast<const Geometry*>(at), x, g, total, squares, scratch, threads);
}

CREDO_EXPORT(convolution_f64)
(const int64_t* at, const double* x, const double* g, double* total, double* squares, double* scratch, int threads) {
    return convolution(*reinterpret_cast<const Geometry*>(at), x, g, total, squares, scratch, threads);
}
