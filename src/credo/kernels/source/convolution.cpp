// Σᵢrᵢ and Σᵢrᵢ² of a convolution's weight, where example i's own gradient is
//
//     rᵢ[o, c, k] = Σ_p g[o, p] · x[c, stride·p + dilation·k − padding]
//
// A tap k is a product of two matrices over the places p: x moved by k, and g. Neither is unfolded: the inner loop
// walks through x in steps of the stride, over the places where the tap is inside the image and nowhere else. One of
// x and g gives the scalars ("left") and the other the vectors ("right"). Threads share large weights tile by tile;
// small ones are summed over slices of the examples. Neither lets the number of threads change the result.
#include "groups.h"
#include "plan.h"
#include "transposed.h"

namespace {

template <typename T>
class Convolution {
    static constexpr int64_t width = Simd<T>::width;
    const Plan<T> plan;
    const Geometry &at = plan.at, &given = plan.given;
    const Operand &x = plan.x, &g = plan.g, &left = plan.left(), &right = plan.right();
    const int64_t tap_jobs = divide_up(plan.tap_count, plan.taps_per_job);
    const int64_t column_jobs = divide_up(right.count, plan.vectors), jobs = left.count * column_jobs * tap_jobs;
    const int64_t packed = divide_up(plan.packed(plan.chunk), 16) * 16;

    // Where x, g and the outputs of one group begin, or those of a chunk of its examples.
    struct Tensors {
        const T *x, *g;
        T *total, *squares;
    };

    // One tile of the weight: rows, columns in lanes, taps.
    struct Job {
        int64_t row, rows, column, vectors, lanes, tap, taps;
    };

   public:
    explicit Convolution(const Geometry& all) : plan(all) {}

    int64_t scratch(int threads) const {
        const int64_t shared = plan.sliced ? plan.slices * 2 * plan.weights() : 0;
        return sizeof(T) * larger(1, workers(threads) * packed + shared);
    }

    void run(const Tensors& all, T* scratch, int threads) const {
        if (plan.sliced) return run_slices(all, scratch, workers(threads));
        for (int64_t group = 0; group < at.groups; ++group) run_tiles(group_of(all, group), scratch, threads);
    }

   private:
    // Slices are packed by every thread for itself: no more threads than there is work and memory for.
    int64_t workers(int64_t threads) const {
        if (!plan.sliced) return 1;
        const int64_t affordable = plan.chunk_bytes / larger(1, sizeof(T) * packed);
        return smaller(smaller(threads, plan.slices * at.groups), larger(1, affordable));
    }

    Tensors group_of(const Tensors& all, int64_t group) const {
        const int64_t weight = group * plan.group_weights();
        const int64_t in_x = group * given.channels * given.x.channel, in_g = group * given.outputs * given.g.channel;
        return Tensors{all.x + in_x, all.g + in_g, all.total + weight, all.squares + weight};
    }

    Tensors from_example(const Tensors& all, int64_t m) const {
        return Tensors{all.x + m * given.x.example, all.g + m * given.g.example, all.total, all.squares};
    }

    // Large weights: threads share the packed examples and divide the tiles.
    void run_tiles(const Tensors& group, T* scratch, int threads) const {
#pragma omp parallel num_threads(threads)
        for (int64_t m = 0; m < at.examples; m += plan.chunk) {
            const Tensors part = from_example(group, m);
            const int64_t examples = smaller(plan.chunk, at.examples - m);
#pragma omp for schedule(dynamic)
            for (int64_t i = 0; i < examples; ++i) pack(part, i, scratch);
#pragma omp for schedule(dynamic)
            for (int64_t j = 0; j < jobs; ++j) do_job(j, part, scratch, examples, m > 0);
        }
    }

    // Small weights: every thread packs and sums slices of the examples by itself; the slices are added in order.
    void run_slices(const Tensors& all, T* scratch, int threads) const {
        T* partial = scratch + threads * packed;  // [slice][total, squares][weight]
        const int64_t weights = plan.weights(), share = divide_up(at.examples, plan.slices);
#pragma omp parallel num_threads(threads)
        {
#pragma omp for schedule(dynamic)
            for (int64_t i = 0; i < plan.slices * at.groups; ++i) {
                T* sums = partial + 2 * (i % plan.slices) * weights;
                const Tensors slice = group_of(Tensors{all.x, all.g, sums, sums + weights}, i / plan.slices);
                const int64_t first = i % plan.slices * share;
                sum_slice(slice, first, smaller(first + share, at.examples), scratch + thread_number() * packed);
            }
#pragma omp for
            for (int64_t i = 0; i < weights; ++i) {
                all.total[i] = all.squares[i] = 0;
                for (int64_t s = 0; s < plan.slices; ++s) {
                    all.total[i] += partial[2 * s * weights + i];
                    all.squares[i] += partial[(2 * s + 1) * weights + i];
                }
            }
        }
    }

    void sum_slice(const Tensors& slice, int64_t first, int64_t end, T* scratch) const {
        for (int64_t m = first; m < end; m += plan.chunk) {
            const Tensors part = from_example(slice, m);
            const int64_t examples = smaller(plan.chunk, end - m);
            for (int64_t i = 0; i < examples; ++i) pack(part, i, scratch);
            for (int64_t j = 0; j < jobs; ++j) do_job(j, part, scratch, examples, m > first);
        }
        for (int64_t i = 0; first >= end && i < plan.group_weights(); ++i) slice.total[i] = slice.squares[i] = 0;
    }

    // Example m of a chunk: x to the beginning of the scratch memory, g behind it.
    void pack(const Tensors& part, int64_t m, T* scratch) const {
        const T *x_from = part.x + m * given.x.example, *g_from = part.g + m * given.g.example;
        T *x_to = scratch + m * x.example, *g_to = scratch + plan.packed_x(plan.chunk) + m * g.example;
        if (plan.runs)
            pack_padded(x_from, given.x, given.channels, given.size, given.padding[2], x_to);
        else if (x.packed)
            pack_blocks(x_from, given.x, x, at.channels, product(at.size), x_to);
        if (g.packed) pack_blocks(g_from, given.g, g, at.outputs, product(at.places), g_to);
    }

    static void pack_blocks(const T* from, const Strides& s, const Operand& as, int64_t channels, int64_t places,
                            T* to) {
        for (int64_t c = 0; c < channels; c += as.width, to += as.block)
            pack_block(from + c * s.channel, s, smaller(as.width, channels - c), places, as.pitch, to);
    }

    Job job_of(int64_t number) const {
        const int64_t tap = number % tap_jobs * plan.taps_per_job, tile = number / tap_jobs;
        const int64_t vector = tile % column_jobs * plan.vectors, row = tile / column_jobs * left.width;
        const int64_t vectors = smaller(plan.vectors, right.count - vector), column = vector * width;
        const int64_t rows = smaller(left.width, plan.rows() - row);
        const int64_t lanes = smaller(vectors * width, plan.columns() - column);
        return Job{row, rows, column, vectors, lanes, tap, smaller(plan.taps_per_job, plan.tap_count - tap)};
    }

    // One tile over the examples of a chunk, added to what is there when `add`.
    void do_job(int64_t number, const Tensors& part, const T* scratch, int64_t examples, bool add) const {
        const Job job = job_of(number);
        const T *x_at = x.packed ? scratch : part.x, *g_at = g.packed ? scratch + plan.packed_x(plan.chunk) : part.g;
        const Steps x_steps = at.x_steps(x.example, x.pitch), g_steps = at.g_steps(g.example, g.pitch);
        const int64_t from_left = job.row / left.width * left.block, from_right = job.column / width * right.block;
        alignas(64) T sums[sums_bytes / sizeof(T)];
        memset(sums, 0, sizeof(T) * 2 * job.taps * job.rows * job.vectors * width);
        Tap taps[most_taps];
        for (int64_t k = 0; k < job.taps; ++k) {
            const Tap tap = at.tap(job.tap + k, x.pitch, g.pitch);
            taps[k] = plan.swapped ? Tap{tap.right, tap.left, tap.z, tap.y, tap.x} : tap;
        }
        const auto sweep = sweep_of<T>(job.rows, job.vectors);
        if (plan.swapped)
            sweep({g_at + from_left, x_at + from_right, g_steps, x_steps, right.block, examples, taps, job.taps, sums});
        else
            sweep({x_at + from_left, g_at + from_right, x_steps, g_steps, right.block, examples, taps, job.taps, sums});
        write(job, sums, add, part.total, part.squares);
    }

    // From [tap][total, squares][row][lane] to the layout of the weight, [output][channel][tap].
    void write(const Job& job, const T* sums, bool add, T* total, T* squares) const {
        if (plan.runs) return write_run(job, sums, add, total, squares);
        const int64_t row = job.vectors * width, size = job.rows * row, step = plan.swapped ? 1 : at.channels;
        // Where lanes are outputs, the taps of one row follow those of another.
        const int64_t together = plan.swapped || job.taps < plan.tap_count ? 1 : job.rows;
        for (int64_t r = 0; r < job.rows; r += together)
            for (int64_t v = 0; v < job.vectors; ++v) {
                const int64_t line = job.row + r, column = job.column + v * width;
                const int64_t first = plan.swapped ? first_tap(line, column) : first_tap(column, line);
                const Matrix<T> of_total = {sums + r * row + v * width, together, job.taps, row, 2 * size};
                const Matrix<T> of_squares = {of_total.first + size, together, job.taps, row, 2 * size};
                const int64_t lanes = smaller(width, job.lanes - v * width), next = step * plan.tap_count;
                of_total.transpose_to(total + first + job.tap, next, lanes, add);
                of_squares.transpose_to(squares + first + job.tap, next, lanes, add);
            }
    }

    void write_run(const Job& job, const T* sums, bool add, T* total, T* squares) const {
        const int64_t size = job.rows * job.vectors * width, step = given.kernel[2];
        const int64_t outputs = plan.swapped ? job.rows : job.lanes, channels = plan.swapped ? job.lanes : job.rows;
        for (int64_t o = 0; o < outputs; ++o)
            for (int64_t c = 0; c < channels; ++c) {
                const int64_t output = (plan.swapped ? job.row : job.column) + o;
                const int64_t channel = (plan.swapped ? job.column : job.row) + c;
                const int64_t to = first_tap(output, channel) + job.tap * step;
                const T* from = sums + (plan.swapped ? o : c) * job.vectors * width + (plan.swapped ? c : o);
                for (int64_t k = 0; k < job.taps; ++k, from += 2 * size) {
                    total[to + k * step] = from[0] + (add ? total[to + k * step] : 0);
                    squares[to + k * step] = from[size] + (add ? squares[to + k * step] : 0);
                }
            }
    }

    // In a run, channel number j is tap j / C of its row, and channel j % C.
    int64_t first_tap(int64_t output, int64_t channel) const {
        const int64_t taps = product(given.kernel), first = output * given.channels;
        if (!plan.runs) return (first + channel) * taps;
        return (first + channel % given.channels) * taps + channel / given.channels;
    }
};

// tensors: x, g, total, squares, and scratch or null.
template <typename T>
int64_t convolution(const int64_t* numbers, T* const* tensors, int threads) {
    const T *const x = tensors[0], *const g = tensors[1];
    T *const total = tensors[2], *const squares = tensors[3], *const scratch = tensors[4];
    const Geometry& at = *reinterpret_cast<const Geometry*>(numbers);
    const int64_t weights = at.outputs * at.channels / at.groups * product(at.kernel);
    if (weights * at.examples * product(at.places) < 1 << 18) threads = 1;  // shorter than waking a thread
    const Groups<T> many(at);
    if (at.groups > 1 && many.suits()) {
        if (!scratch) return many.scratch(threads);
        many.run(x, g, total, squares, scratch, threads);
        return 0;
    }
    const Convolution<T> work(at);
    if (!scratch) return work.scratch(threads);
    work.run({x, g, total, squares}, scratch, threads);
    return 0;
}

}  // namespace

CREDO_EXPORT(convolution_f32)(const int64_t* at, float* const* tensors, int threads) {
    return convolution(at, tensors, threads);
}

CREDO_EXPORT(convolution_f64)(const int64_t* at, double* const* tensors, int threads) {
    return convolution(at, tensors, threads);
}
