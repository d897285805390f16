// AVX-512 with VNNI and VBMI, whose byte permutation is one operation where VPERMW is two (Intel).
#pragma once

#include "avx512_vnni.h"

namespace cpu_moe::avx512_vbmi {

struct V : avx512_vnni::V {
  // The 16 entries four times: VPERMB takes six bits of an index, of which the upper two are then anything.
  static CPU_MOE_INLINE Table table(const int8_t* entries) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(entries)));
  }
  static CPU_MOE_INLINE void lookup_nibbles_x256(Table table, Bytes v, I16* out) {
    const __m512i low = _mm512_permutexvar_epi8(v, table);
    const __m512i high = _mm512_permutexvar_epi8(_mm512_srli_epi16(v, 4), table);
    // A signed byte times 256 needs no sign extension: it becomes the high half.
    const __m512i high_half = _mm512_set1_epi16(static_cast<short>(0xFF00));
    out[0] = _mm512_slli_epi16(low, 8);
    out[1] = _mm512_slli_epi16(high, 8);
    out[2] = _mm512_and_si512(low, high_half);
    out[3] = _mm512_and_si512(high, high_half);
  }
};

}  // namespace cpu_moe::avx512_vbmi
