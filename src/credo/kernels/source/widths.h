// The width of the noise of a tile, σ = √(scale / precision).
#pragma once

#include "gaussian.h"

namespace {

template <typename T>
CREDO_INLINE void widths(T (&sigma)[tile_size], const T (&precision)[tile_size], T scale) {
#pragma omp simd
    for (int i = 0; i < tile_size; ++i) sigma[i] = root(scale / precision[i]);
}

#if defined(CREDO_ISA_AVX512)
// Division and root take turns at the one slow unit, which the noise needs too. An estimate of 14 bits, mended once,
// is as exact as what they round twice; where it cannot be mended, at zero and infinity, it is exact already.
CREDO_INLINE void widths(float (&sigma)[tile_size], const float (&precision)[tile_size], float scale) {
    const __m512 one = _mm512_set1_ps(1), half = _mm512_set1_ps(0.5f), unit = _mm512_set1_ps(root(scale));
    CREDO_UNROLL
    for (int i = 0; i < tile_size; i += Simd<float>::width) {
        const __m512 x = _mm512_loadu_ps(precision + i), y = _mm512_rsqrt14_ps(x);
        const __m512 wrong = _mm512_fnmadd_ps(_mm512_mul_ps(x, y), y, one);  // 1 − xy²
        const __mmask16 number = _mm512_cmp_ps_mask(wrong, wrong, _CMP_ORD_Q);
        _mm512_storeu_ps(sigma + i,
                         _mm512_mul_ps(unit, _mm512_mask_fmadd_ps(y, number, _mm512_mul_ps(half, wrong), y)));
    }
}
#endif

}  // namespace
