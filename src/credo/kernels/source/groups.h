// Convolutions of many small groups, depthwise above all: lanes are groups, so both operands are vectors.
//
//     own[o][c][k] = Σ_p g[o][p] · x[c][p moved by k]        lane by lane; o and c count within a group
#pragma once

#include "geometry.h"

namespace {

template <typename T>
class Groups {
    using S = Simd<T>;
    using Vector = typename S::Vector;
    static constexpr int64_t width = S::width, most_sums = 64 << 10;

    Geometry at;                               // `channels` and `outputs` are those of one group
    int64_t tap_count, chunk, x_size, g_size;  // x_size, g_size: packed elements of one channel and example

   public:
    explicit Groups(const Geometry& all) : at(all) {
        at.channels /= at.groups;
        at.outputs /= at.groups;
        tap_count = product(at.kernel);
        x_size = product(at.size) * width;
        g_size = product(at.places) * width;
        const int64_t bytes = sizeof(T) * (at.channels * x_size + at.outputs * g_size);
        chunk = larger(1, smaller(at.examples, l2_bytes / bytes));
    }

    bool suits() const { return 2 * at.groups >= width && sizeof(T) * sums_elements() <= most_sums; }

    int64_t scratch(int threads) const { return sizeof(T) * workers(threads) * thread_elements(); }

    void run(const T* x, const T* g, T* total, T* squares, T* scratch, int threads) const {
#pragma omp parallel for num_threads(workers(threads)) schedule(dynamic)
        for (int64_t first = 0; first < at.groups; first += width)
            block(first, x, g, total, squares, scratch + thread_number() * thread_elements());
    }

   private:
    // Every thread packs for itself: no more threads than there is work and memory for.
    int64_t workers(int64_t threads) const {
        const int64_t affordable = (16 << 20) / int64_t(sizeof(T) * thread_elements());
        return smaller(smaller(threads, divide_up(at.groups, width)), larger(1, affordable));
    }
    int64_t sums_elements() const { return 2 * at.outputs * at.channels * tap_count * width; }
    int64_t thread_elements() const {
        return sums_elements() + chunk * (at.channels * x_size + at.outputs * g_size);
    }

    // As many groups as a vector has lanes.
    void block(int64_t first, const T* x, const T* g, T* total, T* squares, T* sums) const {
        const int64_t lanes = smaller(width, at.groups - first);
        T *x_packed = sums + sums_elements(), *g_packed = x_packed + chunk * at.channels * x_size;
        memset(sums, 0, sizeof(T) * sums_elements());
        for (int64_t m = 0; m < at.examples; ++m) {
            const int64_t i = m % chunk;
            T *x_to = x_packed + i * at.channels * x_size, *g_to = g_packed + i * at.outputs * g_size;
            pack(x + m * at.x.example, at.x, first, lanes, at.channels, product(at.size), x_to);
            pack(g + m * at.g.example, at.g, first, lanes, at.outputs, product(at.places), g_to);
            if (i + 1 == chunk || m + 1 == at.examples) add(i + 1, x_packed, g_packed, sums);
        }
        write(first, lanes, sums, total, squares);
    }

    // Channel c of all groups of the block, for every c of a group: [c][place][group].
    static void pack(const T* from, Strides s, int64_t first, int64_t lanes, int64_t channels, int64_t places, T* to) {
        from += first * channels * s.channel;
        if (channels == 1) return pack_block(from, s, lanes, places, width, to);
        for (int64_t c = 0; c < channels; ++c, from += s.channel)
            for (int64_t p = 0; p < places; ++p, to += width)
                for (int64_t lane = 0; lane < width; ++lane)
                    to[lane] = lane < lanes ? from[lane * channels * s.channel + p * s.place] : 0;
    }

    void add(int64_t examples, const T* x_packed, const T* g_packed, T* sums) const {
        const Steps x_steps = at.x_steps(0, width), g_steps = at.g_steps(0, width);
        for (int64_t m = 0; m < examples; ++m)
            for (int64_t o = 0; o < at.outputs; ++o)
                for (int64_t c = 0; c < at.channels; ++c)
                    for (int64_t k = 0; k < tap_count; ++k) {
                        const T* x_at = x_packed + (m * at.channels + c) * x_size;
                        const T* g_at = g_packed + (m * at.outputs + o) * g_size;
                        const Vector own = one_tap(at.tap(k, width, width), x_at, g_at, x_steps, g_steps);
                        T* to = sums + 2 * ((o * at.channels + c) * tap_count + k) * width;
                        S::store(to, S::load(to) + own);
                        S::store(to + width, S::load(to + width) + own * own);
                    }
    }

    // Four sums side by side, or each addition would wait for the one before.
    static Vector one_tap(const Tap& tap, const T* x, const T* g, const Steps& x_steps, const Steps& g_steps) {
        Vector own[4] = {};
        for (int64_t z = 0; z < tap.z; ++z)
            for (int64_t y = 0; y < tap.y; ++y) {
                const T* x_row = x + tap.left + z * x_steps.z + y * x_steps.y;
                const T* g_row = g + tap.right + z * g_steps.z + y * g_steps.y;
                int64_t p = 0;
                for (; p + 4 <= tap.x; p += 4)
                    CREDO_UNROLL
                    for (int i = 0; i < 4; ++i)
                        own[i] += S::load(x_row + (p + i) * x_steps.x) * S::load(g_row + (p + i) * g_steps.x);
                for (; p < tap.x; ++p) own[0] += S::load(x_row + p * x_steps.x) * S::load(g_row + p * g_steps.x);
            }
        return (own[0] + own[1]) + (own[2] + own[3]);
    }

    void write(int64_t first, int64_t lanes, const T* sums, T* total, T* squares) const {
        const int64_t group = at.outputs * at.channels * tap_count;
        for (int64_t lane = 0; lane < lanes; ++lane)
            for (int64_t i = 0; i < group; ++i) {
                total[(first + lane) * group + i] = sums[2 * i * width + lane];
                squares[(first + lane) * group + i] = sums[(2 * i + 1) * width + lane];
            }
    }
};

}  // namespace
