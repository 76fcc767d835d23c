// How one group of a convolution is computed: which operand gives scalars, what is packed, how work is cut.
#pragma once

#include "geometry.h"

namespace {

// How one of x and g lies in memory when the inner loop reads it, packed or as it came.
struct Operand {
    bool packed;
    int64_t width, count;           // channels of a block (a tile's rows or a vector's lanes), blocks
    int64_t block, example, pitch;  // elements from one block, example and place to the next
};

template <typename T>
struct Plan {
    static constexpr int64_t width = Simd<T>::width;
    static constexpr int64_t chunk_bytes = 12 << 20;  // of packed memory
    static constexpr int64_t slice_bytes = 4 << 20;   // of all slices' sums
    static constexpr int64_t slice_places = 4096;     // fewer would not pay for writing a slice's sums
    static constexpr int64_t least_places = 2048;     // of a chunk: fewer would not pay for writing the tiles
    static constexpr int64_t adjacent_channels = 48;  // with more, places fall on the same few sets of the L1 cache
    static constexpr int64_t few_pixels = 64;
    static constexpr int64_t few_uses = 72;           // which would not pay for packing

    Geometry at, given;  // of one group: as the inner loop sees it, and as it came
    bool runs, swapped, sliced;
    Operand x, g;
    int64_t vectors, tap_count, taps_per_job, slices, chunk;

    explicit Plan(const Geometry& all) : at(all) {
        at.channels /= at.groups;
        at.outputs /= at.groups;
        flatten();
        given = at;
        choose_runs();
        choose_tiles();
        choose_chunks();
    }

    const Operand& left() const { return swapped ? g : x; }
    const Operand& right() const { return swapped ? x : g; }
    int64_t rows() const { return swapped ? at.outputs : at.channels; }
    int64_t columns() const { return swapped ? at.channels : at.outputs; }
    int64_t group_weights() const { return at.outputs * at.channels * tap_count; }
    int64_t weights() const { return group_weights() * at.groups; }

    int64_t packed_x(int64_t examples) const {
        if (runs) return examples * x.example + 2 * width;  // the last vector may look past the end
        return x.packed ? examples * x.example * x.count : 0;
    }
    int64_t packed(int64_t examples) const {
        return packed_x(examples) + (g.packed ? examples * g.example * g.count : 0);
    }

   private:
    // A kernel of one tap that visits every place: all places are one row.
    void flatten() {
        for (int d = 0; d < 3; ++d)
            if (at.kernel[d] != 1 || at.stride[d] != 1 || at.padding[d] != 0 || at.size[d] != at.places[d]) return;
        at.size[2] = at.places[2] = product(at.places);
        at.size[0] = at.size[1] = at.places[0] = at.places[1] = 1;
    }

    // With few channels, the taps along a row are channels too: adjacent in an image whose rows are padded beforehand.
    void choose_runs() {
        runs = at.channels < 12 && at.kernel[2] > 1 && at.dilation[2] == 1;
        if (!runs) return;
        at.size[2] += 2 * at.padding[2];
        at.padding[2] = 0;
        at.channels *= at.kernel[2];
        at.kernel[2] = 1;
    }

    void choose_tiles() {
        tap_count = product(at.kernel);
        // The fuller vectors win; if none wastes a fifth x is on the left, except where writing takes long.
        const int64_t x_on_the_left = at.channels * divide_up(at.outputs, width);
        const int64_t g_on_the_left = at.outputs * divide_up(at.channels, width);
        swapped = large_for_its_places() ? 4 * g_on_the_left < 5 * x_on_the_left : 5 * g_on_the_left < 4 * x_on_the_left;
        vectors = smaller(divide_up(columns(), width), most_vectors);
        const int64_t height = equal_parts(rows(), vectors == 1 ? most_rows : most_rows_wide);
        const int64_t uses = tap_count * at.channels;  // of every element of g
        x = operand(at.channels, swapped ? width : height, given.x, product(at.size), swapped, adjacent_channels);
        g = operand(at.outputs, swapped ? height : width, given.g, product(at.places), !swapped,
                    uses < few_uses ? 4 * adjacent_channels : adjacent_channels);
        if (runs) x = Operand{true, x.width, x.count, x.width, product(at.size) * given.channels, given.channels};
        const int64_t tap_bytes = sizeof(T) * 2 * height * vectors * width;
        taps_per_job = equal_parts(tap_count, larger(1, sums_bytes / tap_bytes));
    }

    // Of such a weight the sums are a good part of the work. With g on the left those of an output are written in one
    // piece; and with small images the vectors of x that a tile needs fit the L1 cache.
    bool large_for_its_places() const {
        const bool moves = at.stride[0] * at.stride[1] * at.stride[2] > 1;
        return !runs && !moves && tap_count > 1 && product(at.size) <= few_pixels;
    }

    // Of a length cut into parts that are about equal and at most `most` long, the longest.
    static int64_t equal_parts(int64_t length, int64_t most) { return divide_up(length, divide_up(length, most)); }

    static Operand operand(int64_t channels, int64_t block, const Strides& s, int64_t places, bool as_vectors,
                           int64_t most_adjacent) {
        const int64_t count = divide_up(channels, block);
        const bool whole = !as_vectors || channels % block == 0;  // a vector must not reach past the last channel
        if (s.channel == 1 && s.place <= most_adjacent && whole)
            return Operand{false, block, count, block, s.example, s.place};
        const int64_t pitch = block < width ? block : divide_up(block, width) * width;
        return Operand{true, block, count, 0, places * pitch, pitch};
    }

    // Small weights are summed over slices of the examples, whose number does not depend on the number of threads.
    void choose_chunks() {
        const int64_t places = product(at.places);
        slices = smaller(divide_up(16, at.groups), larger(1, at.examples * places / slice_places));
        slices = smaller(slices, at.examples);
        sliced = slices * at.groups >= 8 && slices * 2 * weights() * int64_t(sizeof(T)) <= slice_bytes;
        const int64_t most = sliced ? divide_up(at.examples, slices) : at.examples;
        const int64_t read = sizeof(T) * (given.channels * product(at.size) + at.outputs * places);
        const int64_t wanted = larger(divide_up(least_places, places), l2_bytes / read);
        const int64_t allowed = chunk_bytes / larger(1, sizeof(T) * packed(1)) / (sliced ? 2 : 1);
        chunk = equal_parts(most, larger(1, smaller(smaller(most, wanted), allowed)));
        if (x.packed && !runs) x.block = chunk * x.example;
        if (g.packed) g.block = chunk * g.example;
    }
};

}  // namespace
