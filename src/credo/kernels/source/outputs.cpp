// Noise on the outputs of a layer, z = mean + √(variance + tiny)·ε, and the slope ∂z/∂variance, in place.
#include <cstring>

#include "gaussian.h"
#include "lists.h"

namespace {

// One tile: the mean becomes z, the variance the slope ε / 2√(variance + tiny).
template <typename T>
CREDO_INLINE void perturb(T* mean, T* variance, const T* noise, T tiny) {
#pragma omp simd
    for (int i = 0; i < tile_size; ++i) {
        const T sd = root(variance[i] + tiny);
        mean[i] += sd * noise[i];
        variance[i] = noise[i] / (2 * sd);
    }
}

template <typename T>
int64_t noisy(T* const* mean_variance, int64_t size, const int64_t* key, double tiny, int64_t threads) {
    const Key own = {uint64_t(key[0]), uint64_t(key[1]), uint64_t(key[2])};
    divide({1, &size, nullptr}, threads, [&](int64_t, int64_t begin, int64_t end) {
        T *const mean = mean_variance[0], *const variance = mean_variance[1], noise[tile_size];
        for (int64_t i = begin; i < end; i += tile_size) {
            gaussians(own, i / tile_size, noise);
            if (end - i >= tile_size) {
                perturb(mean + i, variance + i, noise, T(tiny));
                continue;
            }
            T m[tile_size] = {}, v[tile_size] = {};  // the last piece, as a whole tile on copies
            const size_t bytes = (end - i) * sizeof(T);
            std::memcpy(m, mean + i, bytes), std::memcpy(v, variance + i, bytes);
            perturb(m, v, noise, T(tiny));
            std::memcpy(mean + i, m, bytes), std::memcpy(variance + i, v, bytes);
        }
    });
    return 0;
}

}  // namespace

// `key`: seed, stream and index of the noise.
CREDO_EXPORT(noisy_f32)(float* const* mean_variance, int64_t size, const int64_t* key, double tiny, int64_t threads) {
    return noisy(mean_variance, size, key, tiny, threads);
}

CREDO_EXPORT(noisy_f64)(double* const* mean_variance, int64_t size, const int64_t* key, double tiny, int64_t threads) {
    return noisy(mean_variance, size, key, tiny, threads);
}
