// AVX2 with AVX-VNNI: its dot product of 16-bit integers adds to a sum by itself.
#pragma once

#include "avx2.h"

namespace cpu_moe::avx_vnni {

struct V : avx2::V {
  static CPU_MOE_INLINE I32 dot4_add(I32 sum, const I16* a, const int16_t* b) {
    for (int i = 0; i < 4; ++i) sum = _mm256_dpwssd_avx_epi32(sum, a[i], load_i16(b + i * kBytes / 2));
    return sum;
  }
};

}  // namespace cpu_moe::avx_vnni
