// E2M1 codes, two to a byte, element 2j in the low nibble of byte j: what mxfp4, ds_fp4 and nvfp4 share.
#pragma once

namespace cpu_moe::CPU_MOE_TIER {

// Twice the value of each code, so that all are integers.
alignas(16) constexpr int8_t kTwiceE2m1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// The four vectors of a step: elements 4i, 4i + 1, 4i + 2, 4i + 3, each as 512 times its value.
CPU_MOE_INLINE void e2m1_weights(const uint8_t* codes, V::Table table, V::I16* out) {
  V::lookup_nibbles_x256(table, V::load_bytes(codes), out);
}

// |sum| <= 12 * 256 * 32768 * 8 products a lane < 2^30; with activations q * 2^(e-14) held as scale 2^(e-1) the unit is
// 2^-13 / 512.
constexpr float kE2m1Unit = 0x1p-22f;

}  // namespace cpu_moe::CPU_MOE_TIER
