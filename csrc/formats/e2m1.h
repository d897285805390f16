// E2M1 codes, two to a byte, element 2j in the low nibble of byte j: what mxfp4, ds_fp4 and nvfp4 share.
#pragma once

namespace cpu_moe::CPU_MOE_TIER {

// Twice the value of each code, so that all are integers, plus 12, so that none is negative.
constexpr int kE2m1Offset = 12;
alignas(16) constexpr int8_t kTwiceE2m1Plus12[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

CPU_MOE_INLINE void e2m1_weights(const uint8_t* codes, V::Bytes table, V::Bytes* out) {
  const V::Bytes bytes = V::load_bytes(codes);
  out[0] = V::lookup(table, V::low_nibbles(bytes));
  out[1] = V::lookup(table, V::high_nibbles(bytes));
}

// |sum| <= 12 * 32639 * 8 products a lane < 2^24, so float32 holds it exactly; with activations q * 2^(e-14) held as
// scale 2^(e-1) the unit is 2^-13 / 2.
constexpr float kE2m1Unit = 0x1p-14f;

}  // namespace cpu_moe::CPU_MOE_TIER
