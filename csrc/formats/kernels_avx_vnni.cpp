// The avx-vnni tier: AVX2 + FMA + F16C + AVX-VNNI.
#include "tier_prelude.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define CPU_MOE_TIER avx_vnni
CPU_MOE_TARGET_BEGIN("avx2,fma,f16c,avxvnni")
#include "../simd/avx_vnni.h"

#include "tier_kernels.h"
CPU_MOE_TARGET_END
#endif
