// A convolution with weights of its own for each slice of the examples, s the slice of example n:
//
//     out[n, o, p] = bias[s, o] + Σ_ck w[s, o, c, k] · x[n, c, stride·p + dilation·k − padding]
//
// The gradient of its input is the same of the output's gradient, spread out by the stride, with the weights turned round.
//
// A thread copies one example after the other into padded rows that stay in its L1 cache; for a stride, every stride-th
// column stands together. Lanes are neighbours in a row of the output, and a register tile is a few rows of a few outputs.
#include <cstring>

#include "simd.h"

namespace {

struct Sizes {  // as `_numbers` in stacked_convolution.py writes it
    int64_t examples, slices, channels, outputs, groups;
    int64_t size[2], places[2], kernel[2], stride[2], padding[2], dilation[2], spread[2];
    int64_t slice, output, channel, first_tap, tap;  // elements from one weight to the next, and to the first tap
};

template <typename T>
struct StackedConvolution {
    using S = Simd<T>;
    using Vector = typename S::Vector;
    static constexpr int64_t width = S::width, together = 2;
    static constexpr int most = registers == 32 ? 8 : 4;  // outputs of a tile

    const Sizes at;
    const T *x, *weights, *bias;
    T* out;

    int64_t inputs() const { return at.channels / at.groups; }  // of one group
    int64_t taps() const { return at.kernel[0] * at.kernel[1]; }
    int64_t extent(int d) const { return (at.places[d] - 1) * at.stride[d] + (at.kernel[d] - 1) * at.dilation[d] + 1; }
    int64_t vectors() const { return (at.places[1] + width - 1) / width; }  // of a row of the output
    // Of one column in `stride`, with room for a vector that begins at the last one.
    int64_t columns() const { return (extent(1) - 1) / at.stride[1] + 1 + vectors() * width - at.places[1]; }
    int64_t row() const { return at.stride[1] * columns(); }
    int64_t image() const { return at.channels * extent(0) * row(); }
    int64_t tap_offset(int64_t k) const {
        const int64_t down = k / at.kernel[1] * at.dilation[0], right = k % at.kernel[1] * at.dilation[1];
        return down * row() + right % at.stride[1] * columns() + right / at.stride[1];
    }
    // Slices differ by one example at most; the larger ones come first.
    int64_t slice_of(int64_t n) const {
        const int64_t each = at.examples / at.slices, larger = at.examples % at.slices;
        return n < larger * (each + 1) ? n / (each + 1) : larger + (n - larger * (each + 1)) / each;
    }
    // Outputs of one tile: as many for each tile of a group as can be.
    int64_t block() const {
        const int64_t all = at.outputs / at.groups, tiles = (all + most - 1) / most;
        return (all + tiles - 1) / tiles;
    }

    void copy_example(const T* from, T* to) const {
        memset(to, 0, sizeof(T) * image());
        for (int64_t c = 0; c < at.channels; ++c, from += at.size[0] * at.size[1], to += extent(0) * row())
            for (int64_t i = 0; i < at.size[0]; ++i) {
                const int64_t y = at.padding[0] + i * at.spread[0];
                if (y >= 0 && y < extent(0)) copy_row(from + i * at.size[1], to + y * row());
            }
    }

    void copy_row(const T* from, T* to) const {
        const int64_t stride = at.stride[1], spread = at.spread[1], padding = at.padding[1], inside = extent(1);
        const int64_t first = padding < 0 ? (-padding + spread - 1) / spread : 0;
        int64_t end = at.size[1];
        if (padding + (end - 1) * spread >= inside) end = (inside - padding - 1) / spread + 1;
        if (stride == 1) {
            for (int64_t j = first; j < end; ++j) to[padding + j * spread] = from[j];
            return;
        }
        for (int64_t j = first, column = padding % stride, place = padding / stride; j < end; ++j) {
            to[column * columns() + place] = from[j];
            if (++column == stride) column = 0, ++place;
        }
    }

    // The weights of one slice as the tiles read them: [tile of outputs][channel][tap][output].
    void copy_weights(const T* from, T* to) const {
        const int64_t all = at.outputs / at.groups, step = block();
        for (int64_t group = 0; group < at.groups; ++group, from += all * inputs() * taps())
            for (int64_t begin = 0; begin < all; begin += step) {
                const int64_t count = all - begin < step ? all - begin : step;
                for (int64_t c = 0; c < inputs(); ++c)
                    for (int64_t k = 0; k < taps(); ++k, to += count)
                        for (int64_t o = 0; o < count; ++o)
                            to[o] = from[(begin + o) * at.output + c * at.channel + at.first_tap + k * at.tap];
            }
    }

    template <int count, int rows>
    CREDO_INLINE void tile(const T* const* from, const T* w, const int64_t* offsets, const T* own_bias, T* const* to,
                           const int64_t* lanes) const {
        Vector sums[count][rows];
        CREDO_UNROLL
        for (int o = 0; o < count; ++o)
            for (int v = 0; v < rows; ++v) sums[o][v] = Vector{} + (own_bias ? own_bias[o] : T(0));
        const int64_t plane = extent(0) * row(), end = taps();
        for (int64_t c = 0; c < inputs(); ++c)
            for (int64_t k = 0; k < end; ++k, w += count) {
                const int64_t offset = c * plane + offsets[k];
                CREDO_UNROLL
                for (int v = 0; v < rows; ++v) {
                    const Vector own = S::load(from[v] + offset);
                    CREDO_UNROLL
                    for (int o = 0; o < count; ++o) sums[o][v] += own * w[o];
                }
            }
        CREDO_UNROLL
        for (int v = 0; v < rows; ++v)
            for (int o = 0; o < count; ++o) S::store(to[v] + o * at.places[0] * at.places[1], sums[o][v], lanes[v]);
    }

    // All places of some outputs of one example.
    template <int count>
    void tiles(const T* from, const T* w, const int64_t* offsets, const T* own_bias, T* to) const {
        const int64_t all = at.places[0] * vectors();
        const T* begin[together];
        T* end[together];
        int64_t lanes[together];
        for (int64_t i = 0; i < all; i += together) {
            const int64_t here = all - i < together ? all - i : together;
            for (int64_t v = 0; v < here; ++v) {
                const int64_t y = (i + v) / vectors(), column = (i + v) % vectors() * width;
                begin[v] = from + y * at.stride[0] * row() + column;
                end[v] = to + y * at.places[1] + column;
                lanes[v] = at.places[1] - column < width ? at.places[1] - column : width;
            }
            if (here == together)
                tile<count, together>(begin, w, offsets, own_bias, end, lanes);
            else
                tile<count, 1>(begin, w, offsets, own_bias, end, lanes);
        }
    }

    template <int count>
    void outputs(int64_t wanted, const T* from, const T* w, const int64_t* offsets, const T* own_bias, T* to) const {
        if constexpr (count > 1)
            if (wanted < count) return outputs<count - 1>(wanted, from, w, offsets, own_bias, to);
        tiles<count>(from, w, offsets, own_bias, to);
    }

    void example(int64_t n, const T* from, const T* w, const int64_t* offsets) const {
        const int64_t all = at.outputs / at.groups, step = block();
        T* const to = out + n * at.outputs * at.places[0] * at.places[1];
        for (int64_t o = 0; o < at.outputs;) {
            const int64_t begin = o % all, count = all - begin < step ? all - begin : step;
            const T* const own_bias = bias ? bias + slice_of(n) * at.outputs + o : nullptr;
            outputs<most>(count, from + o / all * inputs() * extent(0) * row(), w, offsets, own_bias,
                          to + o * at.places[0] * at.places[1]);
            w += count * inputs() * taps(), o += count;
        }
    }

    int64_t weights_of_slice() const { return at.outputs * inputs() * taps(); }
    // For one thread: taps, weights and an example.
    int64_t scratch_elements() const {
        constexpr int64_t line = 64 / sizeof(T);
        return (taps() * sizeof(int64_t) / sizeof(T) + weights_of_slice() + image() + 3 * line) / line * line;
    }

    void run(T* scratch, int threads) const {
#pragma omp parallel num_threads(threads) if (threads > 1)
        {
            int64_t* const offsets = reinterpret_cast<int64_t*>(scratch + thread_number() * scratch_elements());
            for (int64_t k = 0; k < taps(); ++k) offsets[k] = tap_offset(k);
            T* const w = reinterpret_cast<T*>(offsets + taps());
            T* const copy = w + weights_of_slice();
            int64_t ready = -1;
#pragma omp for schedule(static)
            for (int64_t n = 0; n < at.examples; ++n) {
                const int64_t slice = slice_of(n);
                if (slice != ready) copy_weights(weights + slice * at.slice, w), ready = slice;
                copy_example(x + n * at.channels * at.size[0] * at.size[1], copy);
                example(n, copy, w, offsets);
            }
        }
    }
};

}  // namespace

// Without memory it only says how many bytes of scratch each thread needs.
#define CREDO_STACKED_CONVOLUTION(name, T)                                                                            \
    CREDO_EXPORT(name)                                                                                                \
    (const int64_t* at, const T* x, const T* weights, const T* bias, T* out, T* scratch, int threads) {               \
        const StackedConvolution<T> work{*reinterpret_cast<const Sizes*>(at), x, weights, bias, out};                 \
        if (!scratch) return sizeof(T) * work.scratch_elements();                                                     \
        work.run(scratch, threads);                                                                                   \
        return 0;                                                                                                     \
    }

CREDO_STACKED_CONVOLUTION(stacked_convolution_f32, float)
CREDO_STACKED_CONVOLUTION(stacked_convolution_f64, double)
