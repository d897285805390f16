// Narrow floating-point formats, one value at a time: the plain C++ that every tier and the codecs share.
//
// always_inline: a copy kept by the linker must never carry one tier's instructions into another.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "target.h"

namespace cpu_moe {

// 2^e as a float for -149 <= e <= 127.
CPU_MOE_INLINE float exp2_float(int e) {
  return std::bit_cast<float>(e >= -126 ? static_cast<uint32_t>(e + 127) << 23 : uint32_t{1} << (e + 149));
}

// IEEE binary16; subnormals, infinities and NaN included.
CPU_MOE_INLINE float f16_to_f32(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16;
  const uint32_t magnitude = h & 0x7FFF;
  if (magnitude >= 0x7C00) return std::bit_cast<float>(sign | 0x7F800000u | (magnitude & 0x3FF) << 13);
  // Shifted into place the value is 2^112 too small, exactly, subnormals too.
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude << 13) * 0x1p112f));
}

// Round to nearest, ties to even.
CPU_MOE_INLINE uint16_t f32_to_f16(float f) {
  const uint32_t bits = std::bit_cast<uint32_t>(f);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  if (magnitude > 0x7F800000) return static_cast<uint16_t>(sign | 0x7E00);
  if (magnitude >= 0x477FF000) return static_cast<uint16_t>(sign | 0x7C00);  // 65520 and above
  if (magnitude < 0x38800000) {  // below 2^-14: adding 1/2 leaves the value's multiple of 2^-24 in the low bits
    const float aligned = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(aligned) - 0x3F000000u));
  }
  return static_cast<uint16_t>(sign | ((magnitude - 0x38000000u + 0xFFF + (magnitude >> 13 & 1)) >> 13));
}

CPU_MOE_INLINE float bf16_to_f32(uint16_t h) { return std::bit_cast<float>(static_cast<uint32_t>(h) << 16); }

// Round to nearest, ties to even; NaN stays NaN.
CPU_MOE_INLINE uint16_t f32_to_bf16(float f) {
  const uint32_t bits = std::bit_cast<uint32_t>(f);
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

// OCP E4M3 (float8_e4m3fn): no infinity, 0x7F and 0xFF are NaN, the largest value is 448.
CPU_MOE_INLINE float e4m3_to_f32(uint8_t code) {
  const uint32_t sign = static_cast<uint32_t>(code & 0x80) << 24;
  if ((code & 0x7F) == 0x7F) return std::bit_cast<float>(sign | 0x7FC00000u);
  const float magnitude = std::bit_cast<float>(static_cast<uint32_t>(code & 0x7F) << 20) * 0x1p120f;
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
}

// Round to nearest, ties to even; beyond 448 saturates; NaN stays NaN.
CPU_MOE_INLINE uint8_t f32_to_e4m3(float f) {
  const uint32_t bits = std::bit_cast<uint32_t>(f);
  const uint8_t sign = static_cast<uint8_t>(bits >> 24 & 0x80);
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  if (magnitude > 0x7F800000) return static_cast<uint8_t>(sign | 0x7F);
  if (magnitude >= 0x43E00000) return static_cast<uint8_t>(sign | 0x7E);  // 448 and above
  if (magnitude < 0x3C800000) {  // below 2^-6: adding 2^14 leaves the multiple of 2^-9 in the low bits
    const float aligned = std::bit_cast<float>(magnitude) + 16384.0f;
    return static_cast<uint8_t>(sign | (std::bit_cast<uint32_t>(aligned) - 0x46800000u));
  }
  return static_cast<uint8_t>(sign | ((magnitude - 0x3C000000u + 0x7FFFF + (magnitude >> 20 & 1)) >> 20));
}

// OCP E8M0: 2^(code - 127), 255 is NaN.
CPU_MOE_INLINE float e8m0_to_f32(uint8_t code) {
  return code == 255 ? std::numeric_limits<float>::quiet_NaN() : exp2_float(static_cast<int>(code) - 127);
}

// OCP E2M1: sign, two exponent bits, one mantissa bit.
CPU_MOE_INLINE float e2m1_to_f32(int code) {
  constexpr float kMagnitude[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  return code & 8 ? -kMagnitude[code & 7] : kMagnitude[code & 7];
}

// Round to nearest, ties to the even mantissa; beyond 6 saturates; NaN gives 6 (E2M1 has none).
CPU_MOE_INLINE int f32_to_e2m1(float f) {
  const float m = std::fabs(f);
  // The midpoints: a tie goes to the code with an even mantissa bit, hence the alternation of > and >=.
  const int code = !(m > 0.25f)    ? (std::isnan(f) ? 7 : 0)
                   : !(m >= 0.75f) ? 1
                   : !(m > 1.25f)  ? 2
                   : !(m >= 1.75f) ? 3
                   : !(m > 2.5f)   ? 4
                   : !(m >= 3.5f)  ? 5
                   : !(m > 5.0f)   ? 6
                                   : 7;
  return std::signbit(f) ? code | 8 : code;
}

// An unaligned read: parts of a bank may lie at any address.
template <class T>
CPU_MOE_INLINE T read_unaligned(const void* p) {
  T v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

}  // namespace cpu_moe
