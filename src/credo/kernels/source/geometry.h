// The sizes of a convolution, and the places that each tap of its kernel visits.
#pragma once

#include "pack.h"
#include "tile.h"

namespace {

inline int64_t product(const int64_t n[3]) { return n[0] * n[1] * n[2]; }
inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr int64_t l2_bytes = 3 << 19;  // of x and g that one pass over the tiles reads: most of an L2 cache

struct Geometry {  // as `numbers` in convolution.py writes it
    int64_t examples, channels, outputs, groups;
    int64_t size[3], places[3], kernel[3], stride[3], padding[3], dilation[3];
    Strides x, g;

    // From one place of the output to the next, in x and in g, where neighbours are `pitch` elements apart.
    Steps x_steps(int64_t example, int64_t pitch) const {
        const int64_t row = size[2] * pitch;
        return Steps{example, stride[0] * size[1] * row, stride[1] * row, stride[2] * pitch};
    }
    Steps g_steps(int64_t example, int64_t pitch) const {
        const int64_t row = places[2] * pitch;
        return Steps{example, places[1] * row, row, pitch};
    }

    // The places where tap number k is inside the image, with x on the left and g on the right.
    Tap tap(int64_t k, int64_t x_pitch, int64_t g_pitch) const {
        const int64_t taps[3] = {k / (kernel[1] * kernel[2]), k / kernel[2] % kernel[1], k % kernel[2]};
        int64_t first[3], count[3], from[3];
        for (int d = 0; d < 3; ++d) {
            const int64_t shift = taps[d] * dilation[d] - padding[d];
            first[d] = shift < 0 ? divide_up(-shift, stride[d]) : 0;
            const int64_t end = size[d] > shift ? (size[d] - 1 - shift) / stride[d] + 1 : 0;
            count[d] = larger(0, smaller(end, places[d]) - first[d]);
            from[d] = first[d] * stride[d] + shift;
        }
        const int64_t in_x = ((from[0] * size[1] + from[1]) * size[2] + from[2]) * x_pitch;
        const int64_t in_g = ((first[0] * places[1] + first[1]) * places[2] + first[2]) * g_pitch;
        return Tap{in_x, in_g, count[0], count[1], count[2]};
    }
};

}  // namespace
