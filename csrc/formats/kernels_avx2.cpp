// The avx2 tier: AVX2 + FMA + F16C.
#include "tier_prelude.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define CPU_MOE_TIER avx2
CPU_MOE_TARGET_BEGIN("avx2,fma,f16c")
#include "../simd/avx2.h"

#include "tier_kernels.h"
CPU_MOE_TARGET_END
#endif
