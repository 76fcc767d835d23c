// What this processor can run: 0 the baseline, 1 AVX2 with FMA, 2 AVX-512 besides. One copy is enough.
#include "simd.h"

#if defined(CREDO_ISA_BASELINE)
extern "C" __attribute__((visibility("default"))) int credo_cpu_level() {
#if defined(__x86_64__)
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
    return avx2 ? 1 + avx512 : 0;
#else
    return 0;
#endif
}
#endif
