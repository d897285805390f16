// Decode and encode of whole rows in plain C++: for quantize, dequantize, and the rare rows that need IEEE arithmetic
// throughout.
#include <algorithm>
#include <cmath>
#include <vector>

#include "../simd/float_bits.h"
#include "format.h"

namespace cpu_moe {
namespace {

int nibble_at(const uint8_t* packed, int64_t c) { return packed[c / 2] >> (c % 2 * 4) & 15; }

template <class T>
void decode_mxfp4(const Weight& w, int64_t e, int64_t r, T* out) {
  const uint8_t* codes = w.row(0, e, r);
  const uint8_t* scales = w.row(1, e, r);
  for (int64_t c = 0; c < w.cols; ++c)
    out[c] = static_cast<T>(double{e2m1_to_f32(nibble_at(codes, c))} * double{e8m0_to_f32(scales[c / 32])});
}

template <class T>
void decode_nvfp4(const Weight& w, int64_t e, int64_t r, T* out) {
  const uint8_t* codes = w.row(0, e, r);
  const uint8_t* scales = w.row(1, e, r);
  const double global = read_unaligned<float>(w.row(2, e, r));
  for (int64_t c = 0; c < w.cols; ++c) {
    const double value = e2m1_to_f32(nibble_at(codes, c)) * e4m3_to_f32(scales[c / 16]);
    out[c] = static_cast<T>(value * global);
  }
}

template <class T>
void decode_fp8_block(const Weight& w, int64_t e, int64_t r, T* out) {
  const uint8_t* codes = w.row(0, e, r);
  const uint8_t* scales = w.row(1, e, r / 128);
  for (int64_t c = 0; c < w.cols; ++c) {
    const uint8_t* at = scales + c / 128 * w.col_stride[1];
    const float scale =
        w.dtype[1] == DType::kF32 ? read_unaligned<float>(at) : bf16_to_f32(read_unaligned<uint16_t>(at));
    out[c] = static_cast<T>(double{e4m3_to_f32(codes[c])} * double{scale});
  }
}

template <class T>
void decode_q4_0(const Weight& w, int64_t e, int64_t r, T* out) {
  const uint8_t* blocks = w.row(0, e, r);
  for (int64_t c = 0; c < w.cols; ++c) {
    const uint8_t* block = blocks + c / 32 * 18;
    const int j = static_cast<int>(c % 32);
    const int nibble = block[2 + j % 16] >> (j / 16 * 4) & 15;
    out[c] = static_cast<T>(nibble - 8) * T{f16_to_f32(read_unaligned<uint16_t>(block))};
  }
}

template <class T>
void decode_dense(const Weight& w, int64_t e, int64_t r, T* out) {
  const uint8_t* row = w.row(0, e, r);
  for (int64_t c = 0; c < w.cols; ++c) {
    out[c] = w.dtype[0] == DType::kF32    ? read_unaligned<float>(row + 4 * c)
             : w.dtype[0] == DType::kBF16 ? bf16_to_f32(read_unaligned<uint16_t>(row + 2 * c))
                                          : f16_to_f32(read_unaligned<uint16_t>(row + 2 * c));
  }
}

// The owner of the parts is the caller, who handed out fresh contiguous tensors.
uint8_t* writable(const Weight& w, int part, int64_t e, int64_t r) { return const_cast<uint8_t*>(w.row(part, e, r)); }

float magnitude_of(const float* x, int64_t n) {
  float amax = 0;
  for (int64_t i = 0; i < n; ++i) {
    const float m = std::fabs(x[i]);
    if (!(m <= amax)) amax = m;  // a NaN is taken over
    if (std::isnan(amax)) break;
  }
  return amax;
}

void put_nibble(uint8_t* packed, int64_t c, int code) {
  packed[c / 2] = static_cast<uint8_t>(c % 2 ? packed[c / 2] | code << 4 : code);
}

// Scales with a NaN or infinity in the block become NaN (E8M0 has no infinity).
void encode_mxfp4(const Weight& w, int64_t e, const float* values, bool round_up) {
  for (int64_t r = 0; r < w.rows; ++r) {
    uint8_t* codes = writable(w, 0, e, r);
    uint8_t* scales = writable(w, 1, e, r);
    for (int64_t b = 0; b < w.cols / 32; ++b) {
      const float* x = values + r * w.cols + b * 32;
      const float amax = magnitude_of(x, 32);
      int exponent = 0;
      if (!std::isfinite(amax)) {
        scales[b] = 255;
      } else {
        if (round_up) {
          // 2^ceil(log2(amax / 6)), computed from the exact quotient's exponent
          exponent = amax == 0 ? -127 : static_cast<int>(std::ceil(std::log2(static_cast<double>(amax) / 6.0)));
        } else {
          exponent = amax == 0 ? -127 : std::ilogb(amax) - 2;
        }
        exponent = std::clamp(exponent, -127, 127);
        scales[b] = static_cast<uint8_t>(exponent + 127);
      }
      for (int i = 0; i < 32; ++i) {
        const double scaled = std::ldexp(static_cast<double>(x[i]), -exponent);
        put_nibble(codes, b * 32 + i, scales[b] == 255 ? 0 : f32_to_e2m1(static_cast<float>(scaled)));
      }
    }
  }
}

void encode_nvfp4(const Weight& w, int64_t e, const float* values) {
  const float amax = magnitude_of(values, w.rows * w.cols);
  // Of a matrix of the smallest subnormals it would be 0, and 0 / 0 a scale.
  const float global = amax == 0 ? 1.0f : std::max(amax / (6.0f * 448.0f), std::numeric_limits<float>::denorm_min());
  for (int64_t r = 0; r < w.rows; ++r) {
    uint8_t* codes = writable(w, 0, e, r);
    uint8_t* scales = writable(w, 1, e, r);
    std::memcpy(writable(w, 2, e, r), &global, sizeof global);
    for (int64_t b = 0; b < w.cols / 16; ++b) {
      const float* x = values + r * w.cols + b * 16;
      scales[b] = f32_to_e4m3(magnitude_of(x, 16) / 6.0f / global);
      const float scale = e4m3_to_f32(scales[b]) * global;
      for (int i = 0; i < 16; ++i) put_nibble(codes, b * 16 + i, scale > 0 ? f32_to_e2m1(x[i] / scale) : 0);
    }
  }
}

void encode_fp8_block(const Weight& w, int64_t e, const float* values) {
  for (int64_t r0 = 0; r0 < w.rows; r0 += 128) {
    for (int64_t c0 = 0; c0 < w.cols; c0 += 128) {
      const int64_t r1 = std::min(r0 + 128, w.rows), n = std::min<int64_t>(128, w.cols - c0);
      float amax = 0;
      for (int64_t r = r0; r < r1 && !std::isnan(amax); ++r) {
        const float m = magnitude_of(values + r * w.cols + c0, n);
        if (!(m <= amax)) amax = m;
      }
      const float scale = amax == 0 ? 1.0f : amax / 448.0f;
      std::memcpy(writable(w, 1, e, r0 / 128) + c0 / 128 * w.col_stride[1], &scale, sizeof scale);
      for (int64_t r = r0; r < r1; ++r) {
        uint8_t* codes = writable(w, 0, e, r) + c0;
        for (int64_t c = 0; c < n; ++c) codes[c] = f32_to_e4m3(values[r * w.cols + c0 + c] / scale);
      }
    }
  }
}

// ggml's quantize_row_q4_0: d = (the value of largest magnitude) / -8, nibble = min(15, int(x / d + 8.5)).
void encode_q4_0(const Weight& w, int64_t e, const float* values) {
  for (int64_t r = 0; r < w.rows; ++r) {
    uint8_t* blocks = writable(w, 0, e, r);
    for (int64_t b = 0; b < w.cols / 32; ++b) {
      const float* x = values + r * w.cols + b * 32;
      float largest = x[0];
      for (int i = 1; i < 32; ++i) {
        if (std::fabs(x[i]) > std::fabs(largest)) largest = x[i];
      }
      const float d = largest / -8.0f;
      const float inverse = d != 0.0f ? 1.0f / d : 0.0f;
      const uint16_t half = f32_to_f16(d);
      uint8_t* block = blocks + b * 18;
      std::memcpy(block, &half, sizeof half);
      for (int j = 0; j < 16; ++j) {
        const auto code = [&](float v) {
          const float q = v * inverse + 8.5f;
          return q >= 0 ? static_cast<int>(std::min(15.0f, q)) : 0;
        };
        block[2 + j] = static_cast<uint8_t>(code(x[j]) | code(x[j + 16]) << 4);
      }
    }
  }
}

void encode_dense(const Weight& w, int64_t e, const float* values) {
  for (int64_t r = 0; r < w.rows; ++r) {
    uint8_t* row = writable(w, 0, e, r);
    for (int64_t c = 0; c < w.cols; ++c) {
      const float x = values[r * w.cols + c];
      if (w.dtype[0] == DType::kF32) {
        std::memcpy(row + 4 * c, &x, 4);
      } else {
        const uint16_t half = w.dtype[0] == DType::kBF16 ? f32_to_bf16(x) : f32_to_f16(x);
        std::memcpy(row + 2 * c, &half, 2);
      }
    }
  }
}

// In registry() order.
template <class T>
using Decode = void (*)(const Weight&, int64_t, int64_t, T*);
using Encode = void (*)(const Weight&, int64_t, const float*);
constexpr struct {
  Decode<float> decode;
  Decode<double> decode_unrounded;
  Encode encode;
} kCodecs[] = {
    {decode_dense, decode_dense, encode_dense},
    {decode_dense, decode_dense, encode_dense},
    {decode_dense, decode_dense, encode_dense},
    {decode_mxfp4, decode_mxfp4, [](const Weight& w, int64_t e, const float* x) { encode_mxfp4(w, e, x, false); }},
    {decode_nvfp4, decode_nvfp4, encode_nvfp4},
    {decode_mxfp4, decode_mxfp4, [](const Weight& w, int64_t e, const float* x) { encode_mxfp4(w, e, x, true); }},
    {decode_fp8_block, decode_fp8_block, encode_fp8_block},
    {decode_q4_0, decode_q4_0, encode_q4_0},
};

}  // namespace

void decode_row(const Weight& w, int64_t expert, int64_t row, float* out) {
  kCodecs[w.format].decode(w, expert, row, out);
}

void decode_row(const Weight& w, int64_t expert, int64_t row, double* out) {
  kCodecs[w.format].decode_unrounded(w, expert, row, out);
}

void encode_expert(const Weight& w, int64_t expert, const float* values) {
  kCodecs[w.format].encode(w, expert, values);
}

}  // namespace cpu_moe
