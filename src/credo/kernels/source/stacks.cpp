// Many samples of the same weights in one pass, s over the samples: w[s] = μ + ε[s]·√(scale / (curvature + shift)) with
// a stream for each sample, or w[s] = μ + ε[s]·√variance with a seed for each.
//
// The width of a tile is computed once for all samples; the numbers are those of as many single samples.
#include "gaussian.h"
#include "lists.h"
#include "widths.h"

namespace {

// s + shift of `count` elements. A piece of a tile is done as a whole tile: the same arithmetic, wherever the end.
template <bool shifted, typename T>
CREDO_INLINE void add_shift(T (&precision)[tile_size], const T* curvature, const T* shifts, T shift, int64_t count) {
    T s[tile_size] = {};
    copy(precision, curvature, count);
    if (shifted) copy(s, shifts, count);
#pragma omp simd
    for (int i = 0; i < tile_size; ++i) precision[i] += shifted ? s[i] : shift;
}

// `tensors`: rows of stacks (samples, *shape), means, curvatures and shifts; sample s has the stream `stream + s`.
template <bool shifted, typename T>
int64_t sample_stacks(const List& list, T* const* tensors, const double* scale_shift, const int64_t* seed_stream,
                      const int64_t* indices, int64_t samples, int64_t threads) {
    divide(list, threads, [&](int64_t k, int64_t begin, int64_t end) {
        const T *const mean = tensors[list.count + k], *const curvature = tensors[2 * list.count + k];
        const T* const shifts = shifted ? tensors[3 * list.count + k] : mean;
        T* const stack = tensors[k];
        const T scale = T(scale_shift[2 * k]), shift = T(scale_shift[2 * k + 1]);
        const int64_t size = list.sizes[k];
        const Key first = {uint64_t(seed_stream[0]), uint64_t(seed_stream[1]), uint64_t(indices[k])};
        for (int64_t at = begin; at < end; at += tile_size) {
            const int64_t count = smaller(tile_size, end - at);
            T precision[tile_size] = {}, sigma[tile_size], mu[tile_size] = {}, noise[tile_size];
            add_shift<shifted>(precision, curvature + at, shifts + at, shift, count);
            widths(sigma, precision, scale);
            copy(mu, mean + at, count);
            for (int64_t sample = 0; sample < samples; ++sample) {
                gaussians({first.seed, first.stream + sample, first.index}, at / tile_size, noise);
#pragma omp simd
                for (int i = 0; i < tile_size; ++i) noise[i] = mu[i] + noise[i] * sigma[i];
                copy(stack + sample * size + at, noise, count);
            }
        }
    });
    return 0;
}

// `tensors`: rows of stacks (samples, *shape), means and variances. All tensors of a sample are pieces of one row of noise,
// tensor k from element starts[k] on, so that their tiles begin and end anywhere.
template <typename T>
int64_t sample_rows(const List& list, T* const* tensors, const int64_t* seeds, int64_t samples, int64_t threads) {
    divide(list, threads, [&](int64_t k, int64_t begin, int64_t end) {
        const T *const mean = tensors[list.count + k], *const variance = tensors[2 * list.count + k];
        for (int64_t at = begin, count; at < end; at += count) {
            const int64_t tile = (list.start(k) + at) / tile_size, place = (list.start(k) + at) % tile_size;
            count = smaller(tile_size - place, end - at);
            T sigma[tile_size] = {}, mu[tile_size] = {}, noise[tile_size];
            copy(sigma + place, variance + at, count);
            copy(mu + place, mean + at, count);
#pragma omp simd
            for (int i = 0; i < tile_size; ++i) sigma[i] = root(sigma[i]);
            for (int64_t sample = 0; sample < samples; ++sample) {
                gaussians({uint64_t(seeds[sample]), 0, 0}, tile, noise);
#pragma omp simd
                for (int i = 0; i < tile_size; ++i) noise[i] = mu[i] + noise[i] * sigma[i];
                copy(tensors[k] + sample * list.sizes[k] + at, noise + place, count);
            }
        }
    });
    return 0;
}

}  // namespace

// `layout` holds the sizes of one sample and the indices of `count` tensors.
#define CREDO_STACKS(T, type)                                                                                          \
    CREDO_EXPORT(sample_stacks_##type)(T* const* tensors, const int64_t* layout, int64_t count,                        \
                                       const int64_t* seed_stream, const double* scale_shift, int64_t samples,         \
                                       int64_t threads) {                                                              \
        const auto run = tensors[3 * count] ? sample_stacks<true, T> : sample_stacks<false, T>;                        \
        return run({count, layout, nullptr}, tensors, scale_shift, seed_stream, layout + count, samples, threads);     \
    }

// `layout` holds the sizes of one sample and the starts of `count` tensors.
#define CREDO_ROWS(T, type)                                                                                            \
    CREDO_EXPORT(sample_rows_##type)(T* const* tensors, const int64_t* layout, int64_t count, const int64_t* seeds,    \
                                     int64_t samples, int64_t threads) {                                               \
        return sample_rows<T>({count, layout, layout + count}, tensors, seeds, samples, threads);                      \
    }

CREDO_STACKS(float, f32)
CREDO_STACKS(double, f64)
CREDO_ROWS(float, f32)
CREDO_ROWS(double, f64)
