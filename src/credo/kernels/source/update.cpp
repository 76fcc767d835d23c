// VOGN's update in one pass, and whether all numbers of a list are finite, for lists of tensors.
#include <cstring>
#include <type_traits>

#include "lists.h"

namespace {

template <typename T>
struct Settings {
    T lr, beta1, beta2, keep, damping, gradient_scale, squares_scale, prior, weight;
};

constexpr int64_t numbers_each = 8;  // of a tensor

template <typename T>
Settings<T> settings_of(const double* v) {
    return {T(v[0]), T(v[1]), T(v[2]), T(1 - v[2]), T(v[3]), T(v[4]), T(v[5]), T(v[6]), T(v[7])};
}

template <typename T>
struct Operands {
    T *mean, *momentum, *curvature;
    const T *gradient, *squares, *prior, *prior_mean, *origin;  // where the mean is before the update
    T* offset;  // from the mean to the iterate, where the mean is an average of iterates
};

constexpr int64_t far = 1 << 20;  // elements: of more, the means are gone from the caches before anybody reads them

// m ← β₁m + ĝ + δ̃(z−μ₀),  s ← (1−β₂)s + β₂ĥ,  z ← z − α·m/(s+δ̃+γ),  μ ← μ + w(z−μ) for `count` elements from `begin` on,
// a tile at most. Without offsets z−μ there is no average: μ is z.
template <bool prior_tensor, bool prior_mean, bool averages, typename T>
CREDO_INLINE void vogn_tile(const Operands<T>& at, const Settings<T>& set, int64_t begin, int64_t count, T* means) {
#pragma omp simd
    for (int64_t j = 0; j < count; ++j) {
        const int64_t i = begin + j;
        const T prior = prior_tensor ? at.prior[i] : set.prior, mean = at.origin[i];
        const T iterate = averages ? mean + at.offset[i] : mean;
        const T away = prior_mean ? iterate - at.prior_mean[i] : iterate;
        const T m = set.beta1 * at.momentum[i] + set.gradient_scale * at.gradient[i] + prior * away;
        const T s = set.keep * at.curvature[i] + set.beta2 * (set.squares_scale * at.squares[i]);
        at.momentum[i] = m;
        at.curvature[i] = s;
        const T moved = iterate - set.lr * m / (s + prior + set.damping);
        if (averages) {
            const T offset = moved - mean, step = set.weight * offset;
            at.offset[i] = offset - step;
            means[j] = mean + step;
        } else {
            means[j] = moved;
        }
    }
}

template <bool prior_tensor, bool prior_mean, bool averages, typename T>
void vogn(const Operands<T> at, const Settings<T> set, int64_t begin, int64_t end, bool streams) {
    for (int64_t i = begin; i < end; i += tile_size) {
        T means[tile_size];
        const int64_t count = smaller(tile_size, end - i);
        if (count == tile_size)  // a number that the compiler knows
            vogn_tile<prior_tensor, prior_mean, averages>(at, set, i, tile_size, means);
        else
            vogn_tile<prior_tensor, prior_mean, averages>(at, set, i, count, means);
        if (streams)
            stream(at.mean + i, means, count);
        else
            copy(at.mean + i, means, count);
    }
    if (streams) arrive();
}

// A number is infinite or NaN when its exponent is all ones: without its sign, and read as an integer, it is then
// infinity's or larger.
// Looked at in pieces: an early end without a branch per element.
template <typename T>
struct Floating;
template <>
struct Floating<float> {
    using Bits = int32_t;
    static constexpr Bits infinity = 0x7f800000;
};
template <>
struct Floating<double> {
    using Bits = int64_t;
    static constexpr Bits infinity = 0x7ff0000000000000;
};

template <typename T>
bool finite(const T* values, int64_t begin, int64_t end) {
    using Bits = typename Floating<T>::Bits;
    constexpr int64_t piece_size = 1 << 15;
    for (int64_t piece = begin; piece < end; piece += piece_size) {
        const int64_t stop = smaller(piece + piece_size, end);
        Bits largest = 0;
#pragma omp simd reduction(max : largest)
        for (int64_t i = piece; i < stop; ++i) {
            Bits bits;
            std::memcpy(&bits, values + i, sizeof(bits));
            const Bits magnitude = bits & ~(Bits(1) << (8 * sizeof(Bits) - 1));
            largest = magnitude > largest ? magnitude : largest;
        }
        if (largest >= Floating<T>::infinity) return false;
    }
    return true;
}

template <typename T>
int64_t all_finite(const T* const* tensors, const int64_t* sizes, int64_t count, int64_t threads) {
    const auto look = [&](int64_t k, int64_t begin, int64_t end) { return finite(tensors[k], begin, end); };
    return divide_if({count, sizes, nullptr}, threads, look, [](int64_t, int64_t, int64_t) {});
}

// `tensors`: rows of `count` pointers (means, momenta, curvatures, gradients, squares, priors, prior means, origins,
// offsets). The last four may be null throughout: the prior is then a number, its mean zero, the mean where it is to be,
// and the mean no average. `numbers`:
// `numbers_each` for each tensor. With `check` nothing changes unless all gradients and squares are finite; whether they are.
template <typename T>
int64_t vogn_list(T* const* tensors, const int64_t* sizes, int64_t count, const double* numbers, int64_t threads,
                  bool check) {
    const List list = {count, sizes, nullptr};
    const auto look = [&](int64_t k, int64_t begin, int64_t end) {
        return finite(tensors[3 * count + k], begin, end) && finite(tensors[4 * count + k], begin, end);
    };
    const auto move = [&](int64_t k, int64_t begin, int64_t end) {
        const auto row = [&](int r) { return tensors[r * count + k]; };
        const T* const origin = row(7) ? row(7) : row(0);
        const Operands<T> at = {row(0), row(1), row(2), row(3), row(4), row(5), row(6), origin, row(8)};
        const auto choose = [&](auto averages) {
            constexpr bool a = decltype(averages)::value;
            return at.prior ? (at.prior_mean ? vogn<true, true, a, T> : vogn<true, false, a, T>)
                            : (at.prior_mean ? vogn<false, true, a, T> : vogn<false, false, a, T>);
        };
        const auto run = at.offset ? choose(std::true_type{}) : choose(std::false_type{});
        const auto settings = settings_of<T>(numbers + numbers_each * k);
        run(at, settings, begin, end, at.origin != at.mean && list.elements() > far);
    };
    if (check) return divide_if(list, threads, look, move);
    divide(list, threads, move);
    return true;
}

}  // namespace

#define CREDO_UPDATE(T, type)                                                                                          \
    CREDO_EXPORT(vogn_##type)(T* const* tensors, const int64_t* sizes, int64_t count, const double* settings,          \
                              int64_t threads, int64_t check, int64_t* away) {                                         \
        const bool done = vogn_list(tensors, sizes, count, settings, threads, check);                                  \
        if (done && away) *away = 0;                                                                                   \
        return done;                                                                                                   \
    }                                                                                                                  \
    CREDO_EXPORT(all_finite_##type)(const T* const* tensors, const int64_t* sizes, int64_t count, int64_t threads) {   \
        return all_finite(tensors, sizes, count, threads);                                                             \
    }

CREDO_UPDATE(float, f32)
CREDO_UPDATE(double, f64)
