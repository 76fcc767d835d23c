// Windows out of images of bytes, padded with zeros, some of them mirrored.
#include <cstring>

#include "lists.h"

namespace {

struct Sizes {
    int64_t count, channels, rows, columns, height, width, pad;
};

// One row of a window: `width` pixels from column `left` on (which may lie outside), or those mirrored.
CREDO_INLINE void copy_row(const uint8_t* row, uint8_t* out, const Sizes& s, int64_t left, bool mirrored) {
    const int64_t begin = smaller(s.width, larger(0, -left));
    const int64_t end = larger(begin, smaller(s.width, s.columns - left));
    std::memset(out, 0, begin);
    if (mirrored)
        for (int64_t k = begin; k < end; ++k) out[k] = row[s.columns - 1 - left - k];
    else
        std::memcpy(out + begin, row + left + begin, end - begin);
    std::memset(out + end, 0, s.width - end);
}

}  // namespace

// `draws`: rows (top, left, mirrored) of the padded image, one for each of `count` images (channels, rows, columns).
CREDO_EXPORT(windows)(const uint8_t* images, const int64_t* draws, const int64_t* sizes, uint8_t* out, int64_t threads) {
    const Sizes s = {sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6]};
    const int64_t planes = s.count * s.channels;
    threads = larger(1, smaller(threads, planes * s.height * s.width >> 15));
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t plane = 0; plane < planes; ++plane) {
        const int64_t* const draw = draws + plane / s.channels * 3;
        uint8_t* const window = out + plane * s.height * s.width;
        for (int64_t y = 0; y < s.height; ++y) {
            const int64_t row = draw[0] - s.pad + y;
            if (row < 0 || row >= s.rows)
                std::memset(window + y * s.width, 0, s.width);
            else
                copy_row(images + (plane * s.rows + row) * s.columns, window + y * s.width, s, draw[1] - s.pad, draw[2]);
        }
    }
    return 0;
}
