// IVON's update in one pass, and the way from a sample back to the mean, for lists of tensors.
#include "lists.h"

namespace {

template <typename T>
struct Settings {
    T lr, beta1, keep1, keep2, correction, radius, gradient_unit, product_unit, prior;
};

constexpr int64_t numbers_each = 8;  // of a tensor

template <typename T>
Settings<T> settings_of(const double* v) {
    return {T(v[0]), T(v[1]), T(1 - v[1]), T(1 - v[2]), T(v[3]), T(v[4]), T(v[5]), T(v[6]), T(v[7])};
}

template <typename T>
struct Operands {
    T *mean, *momentum, *curvature;
    const T *gradient, *product, *prior, *prior_mean;
};

template <typename T>
CREDO_INLINE T clipped(T value, T radius) {
    const T low = value < -radius ? -radius : value;
    return low > radius ? radius : low;
}

// ĥ = product·(h+δ̃)·unit;  m ← b₁m + (1−b₁)ĝ;  h ← h + d + d²/2(h+δ̃), d = (1−b₂)(ĥ−h);
// μ ← μ − α·clip((m/(1−b₁ᵗ) + δ̃(μ−μ₀)) / (h+δ̃)) for the elements [begin, end).
template <bool prior_tensor, bool prior_mean, typename T>
void ivon(const Operands<T> at, const Settings<T> set, int64_t begin, int64_t end) {
    constexpr T largest = T(1e30);  // an infinite curvature would be a variance of zero
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) {
        const T prior = prior_tensor ? at.prior[i] : set.prior;
        const T away = prior_mean ? at.mean[i] - at.prior_mean[i] : at.mean[i];
        const T h = at.curvature[i], total = h + prior;
        const T m = set.beta1 * at.momentum[i] + set.keep1 * (set.gradient_unit * at.gradient[i]);
        const T d = set.keep2 * (set.product_unit * at.product[i] * total - h);
        const T grown = h + d + d * (d / (2 * total)), next = grown < largest ? grown : largest;
        at.momentum[i] = m;
        at.curvature[i] = next;
        at.mean[i] -= set.lr * clipped((set.correction * m + prior * away) / (next + prior), set.radius);
    }
}

// `tensors`: rows of `count` pointers (means, momenta, curvatures, gradients, products, priors, prior means). The last
// two rows may be null throughout: the prior is then a number, and its mean zero. `numbers`: `numbers_each` for each tensor.
template <typename T>
int64_t ivon_list(T* const* tensors, const int64_t* sizes, int64_t count, const double* numbers, int64_t threads) {
    divide({count, sizes, nullptr}, threads, [&](int64_t k, int64_t begin, int64_t end) {
        const auto settings = settings_of<T>(numbers + numbers_each * k);
        const auto row = [&](int r) { return tensors[r * count + k]; };
        const Operands<T> at = {row(0), row(1), row(2), row(3), row(4), row(5), row(6)};
        const auto run = at.prior ? (at.prior_mean ? ivon<true, true, T> : ivon<true, false, T>)
                                  : (at.prior_mean ? ivon<false, true, T> : ivon<false, false, T>);
        run(at, settings, begin, end);
    });
    return 0;
}

// weight ← mean, product ← (product +) gradient·(weight − mean). `tensors`: rows in this order, gradients last.
template <typename T>
int64_t restore_list(T* const* tensors, const int64_t* sizes, int64_t count, int64_t add, int64_t threads) {
    divide({count, sizes, nullptr}, threads, [&](int64_t k, int64_t begin, int64_t end) {
        T *const weight = tensors[k], *const product = tensors[2 * count + k];
        const T *const mean = tensors[count + k], *const gradient = tensors[3 * count + k];
        const T old = T(add != 0);
#pragma omp simd
        for (int64_t i = begin; i < end; ++i) {
            const T own = gradient[i] * (weight[i] - mean[i]);
            product[i] = old ? product[i] + own : own;
            weight[i] = mean[i];
        }
    });
    return 0;
}

}  // namespace

#define CREDO_IVON(T, type)                                                                                            \
    CREDO_EXPORT(ivon_##type)(T* const* tensors, const int64_t* sizes, int64_t count, const double* settings,          \
                              int64_t threads) {                                                                       \
        return ivon_list(tensors, sizes, count, settings, threads);                                                    \
    }                                                                                                                  \
    CREDO_EXPORT(restore_##type)(T* const* tensors, const int64_t* sizes, int64_t count, int64_t add,                  \
                                 int64_t threads) {                                                                    \
        return restore_list(tensors, sizes, count, add, threads);                                                      \
    }

CREDO_IVON(float, f32)
CREDO_IVON(double, f64)
