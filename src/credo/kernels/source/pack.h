// Copies of the operands in the order in which the inner loop reads them.
#pragma once

#include <cstring>

#include "simd.h"

namespace {

// A tensor of examples, channels and places: elements from one to the next. Channels or places are adjacent.
struct Strides {
    int64_t example, channel, place;
};

// Adjacent channels of every place, a number that the compiler knows: one or two instructions each.
template <int64_t count, typename T>
void copy_places(const T* from, int64_t step, int64_t places, T* to) {
    for (int64_t p = 0; p < places; ++p, from += step, to += count) memcpy(to, from, sizeof(T) * count);
}

// One example's channels, `count` of them, as [place][pitch]; lanes from `count` to `pitch` become zero.
template <typename T>
void pack_block(const T* from, const Strides& s, int64_t count, int64_t places, int64_t pitch, T* to) {
    using S = Simd<T>;
    constexpr int64_t width = S::width;
    if (s.channel == 1) {
        if (count == pitch && pitch == width) return copy_places<width>(from, s.place, places, to);
        if (count == pitch && 2 * pitch == width) return copy_places<width / 2>(from, s.place, places, to);
        for (int64_t p = 0; p < places; ++p, from += s.place, to += pitch) {
            for (int64_t c = 0; c < count; ++c) to[c] = from[c];
            for (int64_t c = count; c < pitch; ++c) to[c] = 0;
        }
        return;
    }
    // Squares are transposed in registers. Where the pitch is less than a vector, each store spills over the places
    // that come next and are written later; so the last places, and what makes no whole square, go one by one.
    const int64_t safe = places + 1 - (width + pitch - 1) / pitch;
    const int64_t squares = safe < 0 ? 0 : safe / width * width;
    for (int64_t c = 0; c < pitch; c += width) {
        for (int64_t p = 0; p < squares; p += width) {
            typename S::Vector rows[width];
            for (int64_t i = 0; i < width; ++i)
                rows[i] = c + i < count ? S::load(from + (c + i) * s.channel + p) : typename S::Vector{};
            transpose<width>(rows);
            for (int64_t i = 0; i < width; ++i) S::store(to + (p + i) * pitch + c, rows[i]);
        }
        const int64_t end = c + width < pitch ? c + width : pitch;
        for (int64_t p = squares; p < places; ++p)
            for (int64_t i = c; i < end; ++i) to[p * pitch + i] = i < count ? from[i * s.channel + p] : 0;
    }
}

// One example with zeros at both ends of every row, channels last: [z·y][padded x][channel].
template <typename T>
void pack_padded(const T* from, const Strides& s, int64_t channels, const int64_t size[3], int64_t padding, T* to) {
    const int64_t ends = padding * channels, middle = size[2] * channels;
    for (int64_t row = 0; row < size[0] * size[1]; ++row, from += size[2] * s.place, to += middle + 2 * ends) {
        memset(to, 0, sizeof(T) * ends);
        memset(to + ends + middle, 0, sizeof(T) * ends);
        for (int64_t c = 0; c < channels; ++c)
            for (int64_t x = 0; x < size[2]; ++x) to[ends + x * channels + c] = from[c * s.channel + x * s.place];
    }
}

}  // namespace
