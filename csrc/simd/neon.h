// The vector vocabulary for aarch64's Advanced SIMD (NEON), as every ARMv8 CPU has it: 16 bytes, 4 floats.
//
// simd/scalar.h states what each operation means. Dot-product instructions (dotprod, i8mm) multiply bytes and so do not
// serve 16-bit activations.
#pragma once

namespace cpu_moe::neon {

struct V {
  static constexpr int kBytes = 16;
  static constexpr int kLanes = 4;
  static constexpr int kRegisters = 32;
  using Bytes = uint8x16_t;
  using I16 = int16x8_t;
  using I32 = int32x4_t;
  using F32 = float32x4_t;
  using Table = int8x16_t;

  // --- bytes and nibbles -----------------------------------------------------------------------------------------
  static CPU_MOE_INLINE Bytes load_bytes(const void* p) { return vld1q_u8(static_cast<const uint8_t*>(p)); }
  static CPU_MOE_INLINE Bytes load_blocks(const uint8_t* p, int64_t) { return vld1q_u8(p); }
  static CPU_MOE_INLINE Table table(const int8_t* entries) { return vld1q_s8(entries); }
  static CPU_MOE_INLINE void lookup_nibbles_x256(Table table, Bytes v, I16* out) {
    const I16 low = vreinterpretq_s16_s8(vqtbl1q_s8(table, vandq_u8(v, vdupq_n_u8(15))));
    const I16 high = vreinterpretq_s16_s8(vqtbl1q_s8(table, vshrq_n_u8(v, 4)));
    // A signed byte times 256 needs no sign extension: it becomes the high half.
    const I16 high_half = vdupq_n_s16(static_cast<int16_t>(0xFF00));
    out[0] = vshlq_n_s16(low, 8);
    out[1] = vshlq_n_s16(high, 8);
    out[2] = vandq_s16(low, high_half);
    out[3] = vandq_s16(high, high_half);
  }
  static CPU_MOE_INLINE Bytes zero_bytes() { return vdupq_n_u8(0); }
  static CPU_MOE_INLINE Bytes max_magnitude(Bytes m, Bytes v) { return vmaxq_u8(m, vaddq_u8(v, v)); }
  static CPU_MOE_INLINE bool any_magnitude_127(Bytes m) { return vmaxvq_u8(m) == 254; }

  // --- 16-bit integers -------------------------------------------------------------------------------------------
  static CPU_MOE_INLINE I16 even_bytes_x256(Bytes v) { return vshlq_n_s16(as_i16(v), 8); }
  template <int K>
  static CPU_MOE_INLINE I16 nibble(Bytes v) {
    const uint16x8_t lanes = vreinterpretq_u16_u8(v);
    if constexpr (K == 0) {
      return vreinterpretq_s16_u16(vandq_u16(lanes, vdupq_n_u16(15)));
    } else if constexpr (K == 3) {
      return vreinterpretq_s16_u16(vshrq_n_u16(lanes, 12));
    } else {
      return vreinterpretq_s16_u16(vandq_u16(vshrq_n_u16(lanes, 4 * K), vdupq_n_u16(15)));
    }
  }
  static CPU_MOE_INLINE I16 as_i16(Bytes v) { return vreinterpretq_s16_u8(v); }
  static CPU_MOE_INLINE I16 load_i16(const int16_t* p) { return vld1q_s16(p); }
  static CPU_MOE_INLINE I32 dot4_add(I32 sum, const I16* a, const int16_t* b) {
    I16 x = load_i16(b);
    I32 low = vmull_s16(vget_low_s16(a[0]), vget_low_s16(x));
    I32 high = vmull_high_s16(a[0], x);
    for (int i = 1; i < 4; ++i) {
      x = load_i16(b + i * kBytes / 2);
      low = vmlal_s16(low, vget_low_s16(a[i]), vget_low_s16(x));
      high = vmlal_high_s16(high, a[i], x);
    }
    return vaddq_s32(sum, vpaddq_s32(low, high));
  }
  static CPU_MOE_INLINE I16 e4m3_to_bf16(I16 v) {
    return vandq_s16(vshrq_n_s16(v, 4), vdupq_n_s16(static_cast<int16_t>(0x87F0)));
  }

  // --- 32-bit integers -------------------------------------------------------------------------------------------
  static CPU_MOE_INLINE I32 zero_i32() { return vdupq_n_s32(0); }
  static CPU_MOE_INLINE I32 set_i32(int32_t v) { return vdupq_n_s32(v); }
  static CPU_MOE_INLINE I32 load_i32(const int32_t* p) { return vreinterpretq_s32_u8(load_bytes(p)); }
  static CPU_MOE_INLINE void store_i32(int32_t* p, I32 v) { vst1q_s32(p, v); }
  static CPU_MOE_INLINE I32 add(I32 a, I32 b) { return vaddq_s32(a, b); }
  static CPU_MOE_INLINE I32 sub(I32 a, I32 b) { return vsubq_s32(a, b); }
  static CPU_MOE_INLINE I32 max(I32 a, I32 b) { return vmaxq_s32(a, b); }
  static CPU_MOE_INLINE I32 min(I32 a, I32 b) { return vminq_s32(a, b); }
  static CPU_MOE_INLINE I32 bit_and(I32 a, I32 b) { return vandq_s32(a, b); }
  template <int N>
  static CPU_MOE_INLINE I32 shift_left(I32 v) {
    return vshlq_n_s32(v, N);
  }
  template <int N>
  static CPU_MOE_INLINE I32 shift_right(I32 v) {
    return vshrq_n_s32(v, N);
  }
  static CPU_MOE_INLINE int32_t max_of(I32 v) { return vmaxvq_s32(v); }
  template <int Block>
  static CPU_MOE_INLINE I32 load_scale_bytes(const uint8_t* p) {
    return vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(vmovl_u8(load_four(p)))));
  }
  template <int Block>
  static CPU_MOE_INLINE I32 load_signed_scale_bytes(const uint8_t* p) {
    return vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(load_four(p)))));
  }

  // --- floats ----------------------------------------------------------------------------------------------------
  static CPU_MOE_INLINE F32 zero() { return vdupq_n_f32(0); }
  static CPU_MOE_INLINE F32 set(float v) { return vdupq_n_f32(v); }
  static CPU_MOE_INLINE F32 load(const float* p) { return vld1q_f32(p); }
  static CPU_MOE_INLINE F32 load_unaligned_f32(const void* p) { return vreinterpretq_f32_u8(load_bytes(p)); }
  static CPU_MOE_INLINE void store(float* p, F32 v) { vst1q_f32(p, v); }
  static CPU_MOE_INLINE F32 add(F32 a, F32 b) { return vaddq_f32(a, b); }
  static CPU_MOE_INLINE F32 sub(F32 a, F32 b) { return vsubq_f32(a, b); }
  static CPU_MOE_INLINE F32 mul(F32 a, F32 b) { return vmulq_f32(a, b); }
  static CPU_MOE_INLINE F32 div(F32 a, F32 b) { return vdivq_f32(a, b); }
  static CPU_MOE_INLINE F32 fma(F32 a, F32 b, F32 c) { return vfmaq_f32(c, a, b); }
  // Not by FMIN and FMAX, which make another NaN of a NaN.
  static CPU_MOE_INLINE F32 min_keep_nan(F32 bound, F32 v) { return vbslq_f32(vcltq_f32(bound, v), bound, v); }
  static CPU_MOE_INLINE F32 max_keep_nan(F32 bound, F32 v) { return vbslq_f32(vcgtq_f32(bound, v), bound, v); }
  static CPU_MOE_INLINE F32 to_f32(I32 v) { return vcvtq_f32_s32(v); }
  static CPU_MOE_INLINE I32 round_i32(F32 v) { return vcvtnq_s32_f32(v); }
  static CPU_MOE_INLINE F32 as_f32(I32 v) { return vreinterpretq_f32_s32(v); }
  static CPU_MOE_INLINE I32 as_i32(F32 v) { return vreinterpretq_s32_f32(v); }
  static CPU_MOE_INLINE F32 even_bf16(I16 v) { return as_f32(vshlq_n_s32(vreinterpretq_s32_s16(v), 16)); }
  static CPU_MOE_INLINE F32 odd_bf16(I16 v) {
    return as_f32(vandq_s32(vreinterpretq_s32_s16(v), vdupq_n_s32(static_cast<int32_t>(0xFFFF0000))));
  }
  static CPU_MOE_INLINE F32 load_f16(const void* p) {
    return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(static_cast<const uint8_t*>(p))));
  }
  static CPU_MOE_INLINE void store_f16(void* p, F32 v) {
    vst1_u8(static_cast<uint8_t*>(p), vreinterpret_u8_f16(vcvt_f16_f32(v)));
  }
  template <int Block>
  static CPU_MOE_INLINE F32 gather_f16_scales(const uint8_t* p, int64_t stride) {
    uint16_t half[kLanes];
    for (int i = 0; i < kLanes; ++i) std::memcpy(&half[i], p + i * stride, sizeof half[i]);
    return load_f16(half);
  }
  static CPU_MOE_INLINE float sum(F32 v) { return vaddv_f32(vadd_f32(vget_low_f32(v), vget_high_f32(v))); }
  static CPU_MOE_INLINE void sum_each(const F32* v, float* out) {
    for (int i = 0; i < 4; ++i) out[i] = sum(v[i]);
  }
  template <int Block, int K>
  static CPU_MOE_INLINE F32 spread(F32 scales) {
    if constexpr (Block == 32) return vdupq_laneq_f32(scales, K);
    return K == 0 ? vzip1q_f32(scales, scales) : vzip2q_f32(scales, scales);
  }
  static constexpr int scale_slot(int /*block_size*/, int block) { return block; }
  static CPU_MOE_INLINE void prefetch(const void* p) { __builtin_prefetch(p); }

 private:
  // Four bytes; the other half is zero.
  static CPU_MOE_INLINE uint8x8_t load_four(const uint8_t* p) {
    uint32_t four;
    std::memcpy(&four, p, sizeof four);
    return vcreate_u8(four);
  }
};

}  // namespace cpu_moe::neon
