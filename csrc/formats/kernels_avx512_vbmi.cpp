// The avx512-vbmi tier: AVX-512 F + BW + DQ + VL + VNNI + VBMI.
#include "tier_prelude.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define CPU_MOE_TIER avx512_vbmi
CPU_MOE_TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,avx2,fma,f16c")
#include "../simd/avx512_vbmi.h"

#include "tier_kernels.h"
CPU_MOE_TARGET_END
#endif
