// The vector vocabulary for AVX-512 F + BW + DQ + VL: 64 bytes, 16 floats.
//
// Included only inside a target region (see target.h). simd/scalar.h states what each operation means.
#pragma once

namespace cpu_moe::avx512 {

struct V {
  static constexpr int kBytes = 64;
  static constexpr int kLanes = 16;
  static constexpr int kRegisters = 32;
  using Bytes = __m512i;
  using I16 = __m512i;
  using I32 = __m512i;
  using F32 = __m512;
  using Table = __m512i;

  // --- bytes and nibbles -----------------------------------------------------------------------------------------
  static CPU_MOE_INLINE Bytes load_bytes(const void* p) { return _mm512_loadu_si512(p); }
  static CPU_MOE_INLINE Bytes load_blocks(const uint8_t* p, int64_t stride) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(load_block_pair(p, stride)),
                              load_block_pair(p + 2 * stride, stride), 1);
  }
  // The 16 entries twice: VPERMW takes five bits of an index, of which the fifth is then anything.
  static CPU_MOE_INLINE Table table(const int8_t* entries) {
    const __m256i words =
        _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(entries))), 8);
    return _mm512_broadcast_i64x4(words);
  }
  static CPU_MOE_INLINE void lookup_nibbles_x256(Table table, Bytes v, I16* out) {
    out[0] = _mm512_permutexvar_epi16(v, table);
    out[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(v, 4), table);
    out[2] = _mm512_permutexvar_epi16(_mm512_srli_epi16(v, 8), table);
    out[3] = _mm512_permutexvar_epi16(_mm512_srli_epi16(v, 12), table);
  }
  static CPU_MOE_INLINE Bytes zero_bytes() { return _mm512_setzero_si512(); }
  static CPU_MOE_INLINE Bytes max_magnitude(Bytes m, Bytes v) { return _mm512_max_epu8(m, _mm512_add_epi8(v, v)); }
  static CPU_MOE_INLINE bool any_magnitude_127(Bytes m) {
    return _mm512_cmpeq_epi8_mask(m, _mm512_set1_epi8(static_cast<char>(0xFE))) != 0;
  }

  // --- 16-bit integers -------------------------------------------------------------------------------------------
  static CPU_MOE_INLINE I16 even_bytes_x256(Bytes v) { return _mm512_slli_epi16(v, 8); }
  template <int K>
  static CPU_MOE_INLINE I16 nibble(Bytes v) {
    if constexpr (K == 0) return _mm512_and_si512(v, _mm512_set1_epi16(15));
    if constexpr (K == 3) return _mm512_srli_epi16(v, 12);
    return _mm512_and_si512(_mm512_srli_epi16(v, 4 * K), _mm512_set1_epi16(15));
  }
  static CPU_MOE_INLINE I16 as_i16(Bytes v) { return v; }
  static CPU_MOE_INLINE I16 load_i16(const int16_t* p) { return load_bytes(p); }
  static CPU_MOE_INLINE I32 dot4_add(I32 sum, const I16* a, const int16_t* b) {
    constexpr int kStep = kBytes / 2;
    const I32 low = add(_mm512_madd_epi16(a[0], load_i16(b)), _mm512_madd_epi16(a[1], load_i16(b + kStep)));
    const I32 high =
        add(_mm512_madd_epi16(a[2], load_i16(b + 2 * kStep)), _mm512_madd_epi16(a[3], load_i16(b + 3 * kStep)));
    return add(low, add(high, sum));
  }
  static CPU_MOE_INLINE I16 e4m3_to_bf16(I16 v) {
    return _mm512_and_si512(_mm512_srai_epi16(v, 4), _mm512_set1_epi16(static_cast<short>(0x87F0)));
  }

  // --- 32-bit integers -------------------------------------------------------------------------------------------
  static CPU_MOE_INLINE I32 zero_i32() { return _mm512_setzero_si512(); }
  static CPU_MOE_INLINE I32 set_i32(int32_t v) { return _mm512_set1_epi32(v); }
  static CPU_MOE_INLINE I32 load_i32(const int32_t* p) { return load_bytes(p); }
  static CPU_MOE_INLINE void store_i32(int32_t* p, I32 v) { _mm512_storeu_si512(p, v); }
  static CPU_MOE_INLINE I32 add(I32 a, I32 b) { return _mm512_add_epi32(a, b); }
  static CPU_MOE_INLINE I32 sub(I32 a, I32 b) { return _mm512_sub_epi32(a, b); }
  static CPU_MOE_INLINE I32 max(I32 a, I32 b) { return _mm512_max_epi32(a, b); }
  static CPU_MOE_INLINE I32 min(I32 a, I32 b) { return _mm512_min_epi32(a, b); }
  static CPU_MOE_INLINE I32 bit_and(I32 a, I32 b) { return _mm512_and_si512(a, b); }
  template <int N>
  static CPU_MOE_INLINE I32 shift_left(I32 v) {
    return _mm512_slli_epi32(v, N);
  }
  template <int N>
  static CPU_MOE_INLINE I32 shift_right(I32 v) {
    return _mm512_srai_epi32(v, N);
  }
  static CPU_MOE_INLINE int32_t max_of(I32 v) {
    const __m256i half = _mm256_max_epi32(_mm512_castsi512_si256(v), _mm512_extracti64x4_epi64(v, 1));
    __m128i m = _mm_max_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4E));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0xB1));
    return _mm_cvtsi128_si32(m);
  }
  template <int Block>
  static CPU_MOE_INLINE I32 load_scale_bytes(const uint8_t* p) {
    return _mm512_cvtepu8_epi32(spread_order<Block>(p));
  }
  template <int Block>
  static CPU_MOE_INLINE I32 load_signed_scale_bytes(const uint8_t* p) {
    return _mm512_cvtepi8_epi32(spread_order<Block>(p));
  }

  // --- floats ----------------------------------------------------------------------------------------------------
  static CPU_MOE_INLINE F32 zero() { return _mm512_setzero_ps(); }
  static CPU_MOE_INLINE F32 set(float v) { return _mm512_set1_ps(v); }
  static CPU_MOE_INLINE F32 load(const float* p) { return _mm512_loadu_ps(p); }
  static CPU_MOE_INLINE F32 load_unaligned_f32(const void* p) { return as_f32(load_bytes(p)); }
  static CPU_MOE_INLINE void store(float* p, F32 v) { _mm512_storeu_ps(p, v); }
  static CPU_MOE_INLINE F32 add(F32 a, F32 b) { return _mm512_add_ps(a, b); }
  static CPU_MOE_INLINE F32 sub(F32 a, F32 b) { return _mm512_sub_ps(a, b); }
  static CPU_MOE_INLINE F32 mul(F32 a, F32 b) { return _mm512_mul_ps(a, b); }
  static CPU_MOE_INLINE F32 div(F32 a, F32 b) { return _mm512_div_ps(a, b); }
  static CPU_MOE_INLINE F32 fma(F32 a, F32 b, F32 c) { return _mm512_fmadd_ps(a, b, c); }
  static CPU_MOE_INLINE F32 min_keep_nan(F32 bound, F32 v) { return _mm512_min_ps(bound, v); }
  static CPU_MOE_INLINE F32 max_keep_nan(F32 bound, F32 v) { return _mm512_max_ps(bound, v); }
  static CPU_MOE_INLINE F32 to_f32(I32 v) { return _mm512_cvtepi32_ps(v); }
  static CPU_MOE_INLINE I32 round_i32(F32 v) { return _mm512_cvtps_epi32(v); }
  static CPU_MOE_INLINE F32 as_f32(I32 v) { return _mm512_castsi512_ps(v); }
  static CPU_MOE_INLINE I32 as_i32(F32 v) { return _mm512_castps_si512(v); }
  static CPU_MOE_INLINE F32 even_bf16(I16 v) { return as_f32(_mm512_slli_epi32(v, 16)); }
  static CPU_MOE_INLINE F32 odd_bf16(I16 v) {
    return as_f32(_mm512_and_si512(v, _mm512_set1_epi32(static_cast<int>(0xFFFF0000))));
  }
  static CPU_MOE_INLINE F32 load_f16(const void* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
  }
  static CPU_MOE_INLINE void store_f16(void* p, F32 v) {
    _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
  }
  template <int Block>
  static CPU_MOE_INLINE F32 gather_f16_scales(const uint8_t* p, int64_t stride) {
    static_assert(Block == 32, "in-lane order of 32-element blocks");
    // Four blocks' scales lie within 64 bytes; one permutation picks those of two such loads, side by side.
    const __m512i order = _mm512_castsi256_si512(
        _mm256_setr_epi16(0, 32, 9, 41, 18, 50, 27, 59, 0, 0, 0, 0, 0, 0, 0, 0));  // words of 18-byte blocks
    const __m128i steps01 =
        _mm512_castsi512_si128(_mm512_permutex2var_epi16(load_bytes(p), order, load_bytes(p + 4 * stride)));
    const __m128i steps23 = _mm512_castsi512_si128(
        _mm512_permutex2var_epi16(load_bytes(p + 8 * stride), order, load_bytes(p + 12 * stride)));
    return _mm512_cvtph_ps(_mm256_inserti128_si256(_mm256_castsi128_si256(_mm_unpacklo_epi32(steps01, steps23)),
                                                   _mm_unpackhi_epi32(steps01, steps23), 1));
  }
  static CPU_MOE_INLINE float sum(F32 v) {
    __m128 s = quarter_sums(v);
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    s = _mm_add_ss(s, _mm_movehdup_ps(s));
    return _mm_cvtss_f32(s);
  }
  static CPU_MOE_INLINE void sum_each(const F32* v, float* out) {
    const __m128 a = quarter_sums(v[0]), b = quarter_sums(v[1]), c = quarter_sums(v[2]), d = quarter_sums(v[3]);
    const __m128 ab = _mm_add_ps(_mm_unpacklo_ps(a, b), _mm_unpackhi_ps(a, b));
    const __m128 cd = _mm_add_ps(_mm_unpacklo_ps(c, d), _mm_unpackhi_ps(c, d));
    _mm_storeu_ps(out, _mm_add_ps(_mm_movelh_ps(ab, cd), _mm_movehl_ps(cd, ab)));
  }
  template <int Block, int K>
  static CPU_MOE_INLINE F32 spread(F32 scales) {
    constexpr int kSelect = Block == 32 ? K * 0x55 : (K == 0 ? 0x50 : 0xFA);
    return _mm512_permute_ps(scales, kSelect);
  }
  static constexpr int scale_slot(int block_size, int block) {
    return block_size == 32 ? (block % 4) * 4 + block / 4 : ((block / 2) % 4) * 4 + (block / 8) * 2 + block % 2;
  }
  static CPU_MOE_INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

 private:
  static CPU_MOE_INLINE __m128 quarter_sums(F32 v) {
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  }
  static CPU_MOE_INLINE __m256i load_block_pair(const uint8_t* p, int64_t stride) {
    const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_inserti128_si256(_mm256_castsi128_si256(low),
                                   _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + stride)), 1);
  }
  // Sixteen scale bytes in the in-lane order that spread() wants.
  template <int Block>
  static CPU_MOE_INLINE __m128i spread_order(const uint8_t* p) {
    const __m128i order = Block == 32 ? _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15)
                                      : _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
    return _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), order);
  }
};

}  // namespace cpu_moe::avx512
