// The intrinsics of the x86 tiers as portable code (SIMDe), in place of the compiler's header of this name, so that the
// tiers' logic can be tested on a CPU that lacks their instructions. With it goes -DCPU_MOE_EMULATED
// (csrc/simd/target.h and tier.cpp). What SIMDe turns into real instructions are those of the compiler's baseline, SSE2
// on x86-64.
//
// What SIMDe 0.7.4 lacks follows it here, lane by lane as Intel's guide has it; SIMDe's names are macros.
#pragma once

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>
#include <simde/x86/fma.h>

#include <cstddef>

#if !defined(_MM_FROUND_TO_NEAREST_INT)
#define _MM_FROUND_TO_NEAREST_INT 0
#endif

// SIMDe's macro names a function of four arguments, which does not exist.
#undef _mm512_madd_epi16
inline __m512i _mm512_madd_epi16(__m512i a, __m512i b) { return simde_mm512_madd_epi16(a, b); }

// AVX-VNNI's is the same as AVX512-VNNI's.
#if !defined(_mm256_dpwssd_avx_epi32)
inline __m256i _mm256_dpwssd_avx_epi32(__m256i sum, __m256i a, __m256i b) {
  return simde_mm256_dpwssd_epi32(sum, a, b);
}
#endif

// Vectors of 512 bits by their parts: f(i) for each of the 16 lanes or four quarters.
template <class F>
inline __m512i i32_lanes(F f) {
  simde__m512i_private out;
  for (size_t i = 0; i < 16; ++i) out.i32[i] = f(i);
  return simde__m512i_from_private(out);
}
template <class F>
inline __m512i i32_quarters(F f) {
  simde__m512i_private out;
  for (size_t i = 0; i < 4; ++i) out.m128i[i] = f(i);
  return simde__m512i_from_private(out);
}
template <class F>
inline __m512 f32_lanes(F f) {
  simde__m512_private out;
  for (size_t i = 0; i < 16; ++i) out.f32[i] = f(i);
  return simde__m512_from_private(out);
}
template <class F>
inline __m512 f32_quarters(F f) {
  simde__m512_private out;
  for (size_t i = 0; i < 4; ++i) out.m128[i] = f(i);
  return simde__m512_from_private(out);
}

#if !defined(_mm512_cvtph_ps)
inline __m512 _mm512_cvtph_ps(__m256i a) {
  const simde__m256i_private in = simde__m256i_to_private(a);
  simde__m512_private out;
  for (size_t i = 0; i < 2; ++i) out.m256[i] = simde_mm256_cvtph_ps(in.m128i[i]);
  return simde__m512_from_private(out);
}
#endif

#if !defined(_mm512_cvtps_ph)
inline __m256i _mm512_cvtps_ph(__m512 a, int rounding) {
  const simde__m512_private in = simde__m512_to_private(a);
  simde__m256i_private out;
  for (size_t i = 0; i < 2; ++i) out.m128i[i] = simde_mm256_cvtps_ph(in.m256[i], rounding);
  return simde__m256i_from_private(out);
}
#endif

#if !defined(_mm512_cvtps_epi32)
inline __m512i _mm512_cvtps_epi32(__m512 a) {
  return i32_quarters([in = simde__m512_to_private(a)](size_t i) { return simde_mm_cvtps_epi32(in.m128[i]); });
}
#endif

#if !defined(_mm512_cvtepi32_ps)
inline __m512 _mm512_cvtepi32_ps(__m512i a) {
  return f32_quarters([in = simde__m512i_to_private(a)](size_t i) { return simde_mm_cvtepi32_ps(in.m128i[i]); });
}
#endif

#if !defined(_mm512_cvtepi8_epi32)
inline __m512i _mm512_cvtepi8_epi32(__m128i a) {
  return i32_lanes([in = simde__m128i_to_private(a)](size_t i) { return in.i8[i]; });
}
#endif

#if !defined(_mm512_cvtepu8_epi32)
inline __m512i _mm512_cvtepu8_epi32(__m128i a) {
  return i32_lanes([in = simde__m128i_to_private(a)](size_t i) { return in.u8[i]; });
}
#endif

#if !defined(_mm512_srai_epi32)
inline __m512i _mm512_srai_epi32(__m512i a, unsigned count) {
  return i32_lanes([in = simde__m512i_to_private(a), n = count < 31 ? count : 31](size_t i) { return in.i32[i] >> n; });
}
#endif

#if !defined(_mm512_permute_ps)
inline __m512 _mm512_permute_ps(__m512 a, int select) {
  return f32_lanes([in = simde__m512_to_private(a), s = static_cast<size_t>(select)](size_t i) {
    return in.f32[i / 4 * 4 + (s >> i % 4 * 2 & 3)];
  });
}
#endif

#if !defined(_mm512_extractf32x8_ps)
inline __m256 _mm512_extractf32x8_ps(__m512 a, int half) { return simde__m512_to_private(a).m256[half & 1]; }
#endif
