// fp8_block: DeepSeek's block FP8. e4m3 [E, R, C]; scale f32 or bf16 [E, ceil(R/128), ceil(C/128)], any strides.
// weight = e4m3(code) * scale of its 128x128 block; 0x7F and 0xFF are NaN.
//
// A code becomes bf16 bits of value * 2^-120 with a shift and a mask (V::e4m3_to_bf16), subnormals included, and those
// are half of a float32. Activations of each 128 columns are held times 2^(120-e), amax in [2^e, 2^(e+1)): products
// come out as value * x * 2^-e, which no finite input can push out of float32's range, and a block's sum is multiplied
// by scale * 2^e. Error: float32 products and sums. A NaN code would read as 480: the largest code of a row is kept
// instead of testing each.
#pragma once

namespace cpu_moe::CPU_MOE_TIER {

struct Fp8BlockKernel {
  static constexpr int kStreams = 1;
  static constexpr int kTokens = 4;
  static constexpr int rows_at_once(int) { return 1; }
  static constexpr int kBlock = 128;
  static constexpr int kStep = V::kBytes;        // weights, a byte each
  static constexpr int kSteps = kBlock / kStep;  // per block

  // Of the exponents within a block: the least weight is 2^-9, so that the least product is 2^-125, a normal number.
  static constexpr int kMostSpan = 116;

  static int64_t blocks(int64_t cols) { return (cols + kBlock - 1) / kBlock; }
  static int64_t scale_offset(int64_t cols) { return blocks(cols) * kBlock * 4; }
  static int64_t plane_bytes(int64_t cols) {
    return round_up(kPlaneHeaderBytes + scale_offset(cols) + blocks(cols) * 4, 64);
  }
  // Even bytes of 16-bit lanes, even 32-bit halves first: element 4i, 4i + 2, 4i + 1, 4i + 3.
  static constexpr int position(int c) { return ((c % 4 == 1) ? 2 : (c % 4 == 2) ? 1 : c % 4) * V::kLanes + c / 4; }

  static int prepare(const float* x, int64_t cols, Precision, uint8_t* out) {
    const uint32_t amax = max_magnitude_bits(x, cols);
    if (!finite(amax)) return write_raw_plane(x, cols, out);
    PlaneHeader h;
    h.zero = amax == 0;
    std::memcpy(out, &h, sizeof h);
    float* values = reinterpret_cast<float*>(body(out));
    float* scales = reinterpret_cast<float*>(body(out) + scale_offset(cols));
    for (int64_t b = 0; b < blocks(cols); ++b) {
      const int64_t first = b * kBlock;
      const int n = static_cast<int>(std::min<int64_t>(kBlock, cols - first));
      const uint32_t largest = max_magnitude_bits(x + first, n);
      if (exponent_of(min_magnitude_bits(x + first, n)) < exponent_of(largest) - kMostSpan) {
        return write_raw_plane(x, cols, out);
      }
      const int e = std::max(exponent_of(largest), -120);  // so that `half` has a power
      const int half = (120 - e) / 2;                      // 2^(120-e) itself may be out of range
      const float m1 = exp2_float(half), m2 = exp2_float(120 - e - half);
      for (int i = 0; i < kBlock; ++i) {
        values[first + i / kStep * kStep + position(i % kStep)] = i < n ? x[first + i] * m1 * m2 : 0.0f;
      }
      scales[b] = exp2_float(e);
    }
    return 1;
  }

  static CPU_MOE_INLINE float scale_at(const Weight& w, const uint8_t* row, int64_t block) {
    const uint8_t* p = row + block * w.col_stride[1];
    return w.dtype[1] == DType::kF32 ? read_unaligned<float>(p) : bf16_to_f32(read_unaligned<uint16_t>(p));
  }

  template <int N>
  struct Tokens {
    const float* x[N];
    const float* scale[N];
    const uint8_t* plane[N];
    Tokens(int64_t cols, const uint8_t* const* planes) {
      for (int n = 0; n < N; ++n) {
        plane[n] = planes[n];
        x[n] = reinterpret_cast<const float*>(body(planes[n]));
        scale[n] = reinterpret_cast<const float*>(body(planes[n]) + scale_offset(cols));
      }
    }
  };

  template <int N, int R>
  static CPU_MOE_INLINE void dot(const Weight& w, int64_t expert, const int32_t* rows, const Tokens<N>& tokens,
                                 float* out, int64_t out_stride) {
    static_assert(R == 1);
    const int64_t whole = w.cols / kBlock;
    const int64_t rest = w.cols % kBlock;
    const uint8_t* codes = w.row(0, expert, rows[0]);
    const uint8_t* scales = w.row(1, expert, rows[0] / kBlock);
    V::Bytes largest = V::zero_bytes();
    V::F32 sum[N];
    for (int n = 0; n < N; ++n) sum[n] = V::zero();
    for (int64_t b = 0; b < whole; ++b) {
      prefetch_ahead(codes + b * kBlock, kBlock);
      block<N>(codes + b * kBlock, scale_at(w, scales, b), tokens, b, sum, largest);
    }
    if (rest != 0) {
      uint8_t padded[kBlock] = {};
      std::memcpy(padded, codes + whole * kBlock, static_cast<size_t>(rest));
      block<N>(padded, scale_at(w, scales, whole), tokens, whole, sum, largest);
    }
    const bool nan = V::any_magnitude_127(largest);
    for (int n = 0; n < N; ++n) {
      float result = nan ? std::numeric_limits<float>::quiet_NaN() : V::sum(sum[n]);
      // Otherwise what scale * 2^e may have lost, below 2^-126, is nothing beside it.
      const bool ordinary = std::fabs(result) >= 0x1p-100f && std::isfinite(result);
      if (!ordinary && !nan && !header(tokens.plane[n]).zero) result = dot_careful(w, expert, rows[0], tokens.plane[n]);
      out[n * out_stride] = result;
    }
  }

  // Where scale * 2^e left float32's range though the result may not.
  [[gnu::noinline, gnu::cold]] static float dot_careful(const Weight& w, int64_t expert, int32_t row,
                                                        const uint8_t* plane) {
    const Tokens<1> tokens(w.cols, &plane);
    const uint8_t* codes = w.row(0, expert, row);
    const uint8_t* scales = w.row(1, expert, row / kBlock);
    double total = 0;
    for (int64_t b = 0; b < blocks(w.cols); ++b) {
      uint8_t padded[kBlock] = {};
      std::memcpy(padded, codes + b * kBlock, static_cast<size_t>(std::min<int64_t>(kBlock, w.cols - b * kBlock)));
      V::F32 part = V::zero();
      V::Bytes largest = V::zero_bytes();
      block_sum<1>(padded, tokens, b, &part, largest);
      total += static_cast<double>(V::sum(part)) * static_cast<double>(scale_at(w, scales, b)) *
               static_cast<double>(tokens.scale[0][b]);
    }
    return static_cast<float>(total);
  }

  template <int N>
  static CPU_MOE_INLINE void block(const uint8_t* codes, float weight_scale, const Tokens<N>& tokens, int64_t b,
                                   V::F32* sum, V::Bytes& largest) {
    V::F32 part[N];
    block_sum<N>(codes, tokens, b, part, largest);
    for (int n = 0; n < N; ++n) sum[n] = V::fma(part[n], V::set(weight_scale * tokens.scale[n][b]), sum[n]);
  }

  // A block's products, summed, without its scale.
  template <int N>
  static CPU_MOE_INLINE void block_sum(const uint8_t* codes, const Tokens<N>& tokens, int64_t b, V::F32* sum,
                                       V::Bytes& largest) {
    V::F32 part[N][2];
    for (int n = 0; n < N; ++n) part[n][0] = part[n][1] = V::zero();
    for (int s = 0; s < kSteps; ++s) {
      const V::Bytes bytes = V::load_bytes(codes + s * kStep);
      largest = V::max_magnitude(largest, bytes);
      const V::I16 even = V::e4m3_to_bf16(V::even_bytes_x256(bytes));
      const V::I16 odd = V::e4m3_to_bf16(V::as_i16(bytes));
      const V::F32 value[4] = {V::even_bf16(even), V::odd_bf16(even), V::even_bf16(odd), V::odd_bf16(odd)};
      for (int n = 0; n < N; ++n) {
        const float* x = tokens.x[n] + b * kBlock + s * kStep;
        for (int v = 0; v < 4; ++v) part[n][v % 2] = V::fma(value[v], V::load(x + v * V::kLanes), part[n][v % 2]);
      }
    }
    for (int n = 0; n < N; ++n) sum[n] = V::add(part[n][0], part[n][1]);
  }
};

}  // namespace cpu_moe::CPU_MOE_TIER
