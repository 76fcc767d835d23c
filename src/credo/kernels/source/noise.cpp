// Standard normals, and weights w = μ + ε·√(scale / (curvature + shift)) in one pass, for lists of tensors.
#include <type_traits>

#include "gaussian.h"
#include "lists.h"
#include "widths.h"

namespace {

// What one tensor's weights are made of. `shifts` is null when one number is for all; the mean is put by in `kept`
// unless that is null; `offset` is added to the mean unless that is null.
template <typename T>
struct Sampled {
    T* weight;
    const T *mean, *curvature, *shifts;
    T* kept;
    const T* offset;

    Sampled at(int64_t i) const {
        return {weight + i, mean + i, curvature + i, shifts ? shifts + i : nullptr, kept ? kept + i : nullptr,
                offset ? offset + i : nullptr};
    }
};

// One tile.
template <bool shifted, bool keeps, bool moved, typename T>
CREDO_INLINE void combine(const Sampled<T> at, T scale, T shift, const T* noise) {
    T precision[tile_size], sigma[tile_size];
#pragma omp simd
    for (int i = 0; i < tile_size; ++i) precision[i] = at.curvature[i] + (shifted ? at.shifts[i] : shift);
    widths(sigma, precision, scale);
#pragma omp simd
    for (int i = 0; i < tile_size; ++i) {
        const T mean = at.mean[i];
        if (keeps) at.kept[i] = mean;
        at.weight[i] = (moved ? mean + at.offset[i] : mean) + noise[i] * sigma[i];
    }
}

// A piece of a tile is done as a whole tile on copies: the same arithmetic, wherever the cut.
template <bool shifted, bool moved, typename T>
void combine_some(const Sampled<T> at, T scale, T shift, const T* noise, int64_t count) {
    T w[tile_size], m[tile_size] = {}, c[tile_size] = {}, s[tile_size] = {}, n[tile_size] = {}, o[tile_size] = {};
    const size_t bytes = count * sizeof(T);
    std::memcpy(m, at.mean, bytes);
    std::memcpy(c, at.curvature, bytes);
    if (shifted) std::memcpy(s, at.shifts, bytes);
    if (moved) std::memcpy(o, at.offset, bytes);
    std::memcpy(n, noise, bytes);
    combine<shifted, false, moved>(Sampled<T>{w, m, c, s, nullptr, o}, scale, shift, n);
    if (at.kept) std::memcpy(at.kept, m, bytes);
    std::memcpy(at.weight, w, bytes);
}

// What the noise of a list depends on: seed and stream of all, and each tensor's index.
struct Keys {
    const int64_t *seed_stream, *indices;

    Key operator[](int64_t k) const {
        return {uint64_t(seed_stream[0]), uint64_t(seed_stream[1]), uint64_t(indices[k])};
    }
};

// Calls body(i, number of elements, their noise) for each tile, or piece of a tile, of a tensor's [begin, end).
template <typename T, typename Body>
CREDO_INLINE void with_noise(Key key, int64_t start, int64_t begin, int64_t end, const Body& body) {
    T noise[tile_size];
    for (int64_t i = begin; i < end;) {
        const int64_t position = start + i, lane = position % tile_size, count = smaller(tile_size - lane, end - i);
        gaussians(key, position / tile_size, noise);
        body(i, count, noise + lane);
        i += count;
    }
}

template <typename T>
int64_t normal(const List& list, T* const* outs, Keys keys, int64_t threads) {
    divide(list, threads, [&](int64_t k, int64_t begin, int64_t end) {
        with_noise<T>(keys[k], list.start(k), begin, end, [&](int64_t i, int64_t count, const T* noise) {
            copy(outs[k] + i, noise, count);
        });
    });
    return 0;
}

// `tensors`: rows of weights, means, curvatures, shifts, places for the means and offsets; the last three may be null. `scale_shift`:
// two numbers for each tensor; where there are shifts, the second is not read.
template <bool shifted, bool keeps, bool moved, typename T>
int64_t sample(const List& list, T* const* tensors, const double* scale_shift, Keys keys, int64_t threads) {
    divide(list, threads, [&](int64_t k, int64_t begin, int64_t end) {
        const auto row = [&](int r) { return tensors[r * list.count + k]; };
        const Sampled<T> whole = {row(0), row(1), row(2), row(3), row(4), row(5)};
        const T scale = T(scale_shift[2 * k]), shift = T(scale_shift[2 * k + 1]);
        with_noise<T>(keys[k], list.start(k), begin, end, [&](int64_t i, int64_t count, const T* noise) {
            if (count == tile_size)
                combine<shifted, keeps, moved>(whole.at(i), scale, shift, noise);
            else
                combine_some<shifted, moved>(whole.at(i), scale, shift, noise, count);
        });
    });
    return 0;
}

}  // namespace

// The four words of one block, for the tests.
CREDO_EXPORT(noise_words)(const int64_t* seed_stream, int64_t index, int64_t block, uint32_t* out) {
    const Words words = philox(Keys{seed_stream, &index}[0], Lanes{} + uint64_t(block));
    out[0] = uint32_t(words.x[0]), out[1] = uint32_t(words.y[0]);
    out[2] = uint32_t(words.z[0]), out[3] = uint32_t(words.w[0]);
    return 0;
}

// `layout` holds the sizes, the indices and the starts of `count` tensors. `done` becomes 1: Python is interrupted only
// before or after a call.
#define CREDO_NOISE(T, type)                                                                                           \
    CREDO_EXPORT(normal_##type)(T* const* outs, const int64_t* layout, int64_t count, const int64_t* seed_stream,      \
                                int64_t threads) {                                                                     \
        return normal<T>({count, layout, layout + 2 * count}, outs, {seed_stream, layout + count}, threads);           \
    }                                                                                                                  \
    CREDO_EXPORT(sample_##type)(T* const* tensors, const int64_t* layout, int64_t count, const int64_t* seed_stream,   \
                                const double* scale_shift, int64_t threads, int64_t* done) {                           \
        if (done) *done = 1;                                                                                           \
        const bool keeps = tensors[4 * count];                                                                         \
        const auto choose = [&](auto moved) {                                                                          \
            constexpr bool m = decltype(moved)::value;                                                                 \
            return tensors[3 * count] ? (keeps ? sample<true, true, m, T> : sample<true, false, m, T>)                 \
                                      : (keeps ? sample<false, true, m, T> : sample<false, false, m, T>);              \
        };                                                                                                             \
        const auto run = tensors[5 * count] ? choose(std::true_type{}) : choose(std::false_type{});                    \
        return run({count, layout, layout + 2 * count}, tensors, scale_shift, {seed_stream, layout + count}, threads); \
    }

CREDO_NOISE(float, f32)
CREDO_NOISE(double, f64)
