// BatchNorm backward, and the sums of squares of its affine parameters' per-example gradients:
//
//     aᵢ = Σ_p x̂ᵢ_p gᵢ_p        bᵢ = Σ_p gᵢ_p        x̂ = (x − mean)·invstd
//     gx = scale·g + slope·(x − mean) + shift        scale = weight·invstd
//     slope = −scale·invstd·Σaᵢ/n, shift = −scale·Σbᵢ/n in training; both are zero in evaluation
//
// Channels first: a thread takes whole channels, and reads them for gx while they are still in its cache. Channels
// last: threads take slices of the examples, whose number does not depend on theirs; lanes are channels.
#include "pack.h"

namespace {

struct Shape {  // as `numbers` in normalisation.py writes it
    int64_t examples, channels, places;
    Strides x, g;  // of gx as of x
    int64_t training;
};

template <typename T>
struct Scalar {  // stands in for Simd<T> where channels are fewer than lanes
    static constexpr int width = 1;
    typedef T Vector;
    static CREDO_INLINE T load(const T* from) { return *from; }
    static CREDO_INLINE void store(T* to, T v) { *to = v; }
};

template <typename T>
struct Normalisation {
    using S = Simd<T>;
    using Vector = typename S::Vector;
    static constexpr int64_t width = S::width, slices = 16, most_channels = 16;

    const Shape at;
    const T *x, *g, *weight, *mean, *invstd;
    T *gx, *sums;  // sums: [Σa, Σa², Σb, Σb²][channel]

    T scale(int64_t c) const { return (weight ? weight[c] : T(1)) * invstd[c]; }
    T per_place(T sum) const { return at.training ? sum / T(at.examples * at.places) : T(0); }
    T slope(int64_t c) const { return -scale(c) * invstd[c] * per_place(sums[c]); }
    T shift(int64_t c) const { return -scale(c) * per_place(sums[2 * at.channels + c]); }

    // Channels first: one example of one channel.
    void row_sums(const T* x_row, const T* g_row, T centre, T& a, T& b) const {
        Vector products[2] = {}, plain[2] = {};
        int64_t p = 0;
        for (; p + 2 * width <= at.places; p += 2 * width)
            for (int i = 0; i < 2; ++i) {
                const Vector own = S::load(g_row + p + i * width);
                products[i] += (S::load(x_row + p + i * width) - centre) * own;
                plain[i] += own;
            }
        for (; p + width <= at.places; p += width) {
            products[0] += (S::load(x_row + p) - centre) * S::load(g_row + p);
            plain[0] += S::load(g_row + p);
        }
        a = lanes_sum<T>(products[0] + products[1]);
        b = lanes_sum<T>(plain[0] + plain[1]);
        for (; p < at.places; ++p) {
            a += (x_row[p] - centre) * g_row[p];
            b += g_row[p];
        }
    }

    void row_gradient(const T* x_row, const T* g_row, T centre, T scale, T slope, T shift, T* to) const {
        int64_t p = 0;
        for (; p + width <= at.places; p += width)
            S::store(to + p, scale * S::load(g_row + p) + (slope * (S::load(x_row + p) - centre) + shift));
        for (; p < at.places; ++p) to[p] = scale * g_row[p] + (slope * (x_row[p] - centre) + shift);
    }

    // Some adjacent channels, together as long as memory is read in one go.
    void channels(int64_t first, int64_t end) const {
        T sum[most_channels][4] = {};
        for (int64_t m = 0; m < at.examples; ++m)
            for (int64_t c = first; c < end; ++c) {
                T a, b, *own = sum[c - first];
                const T* x_row = x + c * at.x.channel + m * at.x.example;
                const T* g_row = g + c * at.g.channel + m * at.g.example;
                row_sums(x_row, g_row, mean[c], a, b);
                a *= invstd[c];
                own[0] += a, own[1] += a * a, own[2] += b, own[3] += b * b;
            }
        T along[most_channels][3];
        for (int64_t c = first; c < end; ++c) {
            for (int i = 0; i < 4; ++i) sums[i * at.channels + c] = sum[c - first][i];
            along[c - first][0] = scale(c), along[c - first][1] = slope(c), along[c - first][2] = shift(c);
        }
        for (int64_t m = 0; gx && m < at.examples; ++m)
            for (int64_t c = first; c < end; ++c) {
                const T* own = along[c - first];
                row_gradient(x + c * at.x.channel + m * at.x.example, g + c * at.g.channel + m * at.g.example, mean[c],
                             own[0], own[1], own[2], gx + c * at.x.channel + m * at.x.example);
            }
    }

    // Channels last: `vectors` adjacent vectors of channels from c on, over a slice of the examples.
    template <typename L, int vectors>
    void slice_sums(int64_t first, int64_t end, int64_t c, T* to) const {
        typename L::Vector sum[4][vectors] = {}, centre[vectors], inverse[vectors];
        for (int v = 0; v < vectors; ++v) {
            centre[v] = L::load(mean + c + v * L::width);
            inverse[v] = L::load(invstd + c + v * L::width);
        }
        for (int64_t m = first; m < end; ++m) {
            typename L::Vector a[vectors] = {}, b[vectors] = {};
            const T *x_at = x + m * at.x.example + c, *g_at = g + m * at.g.example + c;
            for (int64_t p = 0; p < at.places; ++p, x_at += at.x.place, g_at += at.g.place) {
                CREDO_UNROLL
                for (int v = 0; v < vectors; ++v) {
                    const typename L::Vector own = L::load(g_at + v * L::width);
                    a[v] += (L::load(x_at + v * L::width) - centre[v]) * own;
                    b[v] += own;
                }
            }
            for (int v = 0; v < vectors; ++v) {
                a[v] *= inverse[v];
                sum[0][v] += a[v], sum[1][v] += a[v] * a[v], sum[2][v] += b[v], sum[3][v] += b[v] * b[v];
            }
        }
        for (int i = 0; i < 4; ++i)
            for (int v = 0; v < vectors; ++v) L::store(to + i * at.channels + c + v * L::width, sum[i][v]);
    }

    void slice(int64_t first, int64_t end, T* to) const {
        int64_t c = 0;
        for (; c + 4 * width <= at.channels; c += 4 * width) slice_sums<S, 4>(first, end, c, to);
        for (; c + width <= at.channels; c += width) slice_sums<S, 1>(first, end, c, to);
        for (; c < at.channels; ++c) slice_sums<Scalar<T>, 1>(first, end, c, to);
    }

    // `along` is [scale, slope, shift][channel].
    void example_gradient(int64_t m, const T* along) const {
        for (int64_t p = 0; p < at.places; ++p) {
            const T *x_at = x + m * at.x.example + p * at.x.place, *g_at = g + m * at.g.example + p * at.g.place;
            T* to = gx + m * at.x.example + p * at.x.place;
            const T *scales = along, *slopes = along + at.channels, *shifts = slopes + at.channels;
            int64_t c = 0;
            for (; c + width <= at.channels; c += width) {
                const Vector centred = S::load(x_at + c) - S::load(mean + c);
                const Vector rest = S::load(slopes + c) * centred + S::load(shifts + c);
                S::store(to + c, S::load(scales + c) * S::load(g_at + c) + rest);
            }
            for (; c < at.channels; ++c) to[c] = scales[c] * g_at[c] + (slopes[c] * (x_at[c] - mean[c]) + shifts[c]);
        }
    }

    void run_channels_first(int threads) const {
        const int64_t wanted = 512 / at.places + 1, together = wanted < most_channels ? wanted : most_channels;
#pragma omp parallel for num_threads(threads) schedule(static)
        for (int64_t c = 0; c < at.channels; c += together)
            channels(c, c + together < at.channels ? c + together : at.channels);
    }

    void run_channels_last(T* scratch, int threads) const {
        const int64_t share = (at.examples + slices - 1) / slices, all = 4 * at.channels;
#pragma omp parallel num_threads(threads)
        {
#pragma omp for schedule(static)
            for (int64_t s = 0; s < slices; ++s) {
                const int64_t end = (s + 1) * share < at.examples ? (s + 1) * share : at.examples;
                slice(s * share, end, scratch + s * all);
            }
#pragma omp for schedule(static)
            for (int64_t c = 0; c < at.channels; ++c) {
                for (int i = 0; i < 4; ++i) {
                    T sum = 0;
                    for (int64_t s = 0; s < slices; ++s) sum += scratch[s * all + i * at.channels + c];
                    sums[i * at.channels + c] = sum;
                }
                T* along = scratch + slices * all + c;
                along[0] = scale(c), along[at.channels] = slope(c), along[2 * at.channels] = shift(c);
            }
#pragma omp for schedule(static)
            for (int64_t m = 0; m < (gx ? at.examples : 0); ++m) example_gradient(m, scratch + slices * all);
        }
    }

    static int64_t scratch_elements(const Shape& at) { return (4 * slices + 3) * at.channels; }
};

// tensors: x, g, weight or null, mean, invstd, gx or null, sums, and scratch or null.
template <typename T>
int64_t batch_norm(const Shape& at, T* const* tensors, int threads) {
    T* const scratch = tensors[7];
    if (!scratch) return sizeof(T) * Normalisation<T>::scratch_elements(at);
    const Normalisation<T> work{at, tensors[0], tensors[1], tensors[2], tensors[3], tensors[4], tensors[5], tensors[6]};
    if (at.x.channel == 1 && at.g.channel == 1)
        work.run_channels_last(scratch, threads);
    else
        work.run_channels_first(threads);
    return 0;
}

}  // namespace

#define CREDO_BATCH_NORM(name, T)                                                                                     \
    CREDO_EXPORT(name)(const int64_t* at, T* const* tensors, int threads) {                                           \
        return batch_norm(*reinterpret_cast<const Shape*>(at), tensors, threads);                                     \
    }

CREDO_BATCH_NORM(batch_norm_f32, float)
CREDO_BATCH_NORM(batch_norm_f64, double)
