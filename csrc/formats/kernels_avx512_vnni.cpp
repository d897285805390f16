// The avx512-vnni tier: AVX-512 F + BW + DQ + VL + VNNI.
#include "tier_prelude.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define CPU_MOE_TIER avx512_vnni
CPU_MOE_TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")
#include "../simd/avx512_vnni.h"

#include "tier_kernels.h"
CPU_MOE_TARGET_END
#endif
