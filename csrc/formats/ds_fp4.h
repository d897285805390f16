// ds_fp4: DeepSeek's FP4 experts. Weights exactly as mxfp4 (packed u8 [E, R, C/2], E8M0 scale u8 [E, R, C/32]); the
// activation entering a projection is first rounded to FP8, as DeepSeek's act_quant does with its power-of-two scales:
// per 128 values amax = max(|x|, 1e-4), s = 2^ceil(log2(amax / 448)), x' = e4m3(clamp(x / s, +-448)) * s.
// An E4M3 value keeps all its bits in the int16 planes down to 2^-12 of its block's amax (int16_planes.h).
#pragma once

namespace cpu_moe::CPU_MOE_TIER {

struct DsFp4Kernel : Int16Kernel<Mxfp4> {
  static constexpr int kActivationBlock = 128;

  static int prepare(const float* x, int64_t cols, Precision precision, uint8_t* out) {
    if (!all_finite(x, cols)) return write_raw_plane(x, cols, out);
    std::vector<float> rounded(static_cast<size_t>(cols));
    for (int64_t first = 0; first < cols; first += kActivationBlock) {
      const int64_t n = std::min<int64_t>(kActivationBlock, cols - first);
      round_to_fp8(x + first, n, rounded.data() + first);
    }
    return Int16Kernel<Mxfp4>::prepare(rounded.data(), cols, precision, out);
  }

  static void round_to_fp8(const float* x, int64_t n, float* out) {
    const float amax = std::max(std::bit_cast<float>(max_magnitude_bits(x, n)), 1e-4f);
    const uint32_t ratio = std::bit_cast<uint32_t>(amax * (1.0f / 448.0f));
    const int e = static_cast<int>(ratio >> 23) - 127 + ((ratio & 0x7FFFFF) != 0);
    const float scale = exp2_float(e);
    const float inverse = exp2_float(-e);  // e is between -22 and 120
    for (int64_t i = 0; i < n; ++i) out[i] = e4m3_to_f32(f32_to_e4m3(x[i] * inverse)) * scale;
  }
};

}  // namespace cpu_moe::CPU_MOE_TIER
