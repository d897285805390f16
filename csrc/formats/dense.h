// bf16, f16, f32: weights [E, R, C] of that type, used as they are; products and sums in float32.
#pragma once

namespace cpu_moe::CPU_MOE_TIER {

// bf16 comes out of a vector register as its even and its odd elements, so its activations lie in that order.
struct Bf16 {
  static constexpr int kStep = 2 * V::kLanes;
  static constexpr int64_t kElementBytes = 2;
  static constexpr int position(int c) { return (c % 2) * V::kLanes + c / 2; }
  static CPU_MOE_INLINE void load(const uint8_t* p, V::F32* out) {
    const V::Bytes bits = V::load_bytes(p);
    const V::I16 pairs = V::as_i16(bits);
    out[0] = V::even_bf16(pairs);
    out[1] = V::odd_bf16(pairs);
  }
};

struct F16 {
  static constexpr int kStep = 2 * V::kLanes;
  static constexpr int64_t kElementBytes = 2;
  static constexpr int position(int c) { return c; }
  static CPU_MOE_INLINE void load(const uint8_t* p, V::F32* out) {
    out[0] = V::load_f16(p);
    out[1] = V::load_f16(p + 2 * V::kLanes);
  }
};

struct F32 {
  static constexpr int kStep = 2 * V::kLanes;
  static constexpr int64_t kElementBytes = 4;
  static constexpr int position(int c) { return c; }
  static CPU_MOE_INLINE void load(const uint8_t* p, V::F32* out) {
    out[0] = V::load_unaligned_f32(p);
    out[1] = V::load_unaligned_f32(p + 4 * V::kLanes);
  }
};

template <class Format>
struct DenseKernel {
  static constexpr int kStreams = 2;
  static constexpr int kTokens = V::kRegisters == 32 ? 4 : 3;
  // Tokens times rows times two sums: 24 of 32 registers, 12 of 16. Rows rather than tokens: their activations are read
  // from L1 or L2 for every pass over them.
  static constexpr int rows_at_once(int tokens) {
    if (tokens == 1) return kStreams;
    return V::kRegisters == 32 ? (tokens < 4 ? 4 : 3) : 2;
  }
  static constexpr int kStep = Format::kStep;

  static int64_t plane_bytes(int64_t cols) { return round_up(kPlaneHeaderBytes + round_up(cols, kStep) * 4, 64); }

  static int prepare(const float* x, int64_t cols, Precision, uint8_t* out) {
    const PlaneHeader h;
    std::memcpy(out, &h, sizeof h);
    float* values = reinterpret_cast<float*>(body(out));
    const int64_t whole = cols / kStep * kStep;
    for (int64_t first = 0; first < whole; first += kStep) {
      for (int i = 0; i < kStep; ++i) values[first + Format::position(i)] = x[first + i];
    }
    if (whole < cols) {
      for (int i = 0; i < kStep; ++i) values[whole + Format::position(i)] = whole + i < cols ? x[whole + i] : 0.0f;
    }
    return 1;
  }

  template <int N>
  struct Tokens {
    const float* x[N];
    const bool prefetch = N == 1 && prefetch_dense_rows();
    Tokens(int64_t, const uint8_t* const* planes) {
      for (int n = 0; n < N; ++n) x[n] = reinterpret_cast<const float*>(body(planes[n]));
    }
  };

  template <int N, int R>
  static CPU_MOE_INLINE void dot(const Weight& w, int64_t expert, const int32_t* rows, const Tokens<N>& tokens,
                                 float* out, int64_t out_stride) {
    constexpr int64_t kStepBytes = kStep * Format::kElementBytes;
    // Two sums a row, independent, hide latency.
    const int64_t whole = w.cols / kStep;
    const int64_t rest = w.cols % kStep;
    const uint8_t* row[R];
    for (int i = 0; i < R; ++i) row[i] = w.row(0, expert, rows[i]);
    V::F32 sum[R][N][2];
    for (int i = 0; i < R; ++i) {
      for (int n = 0; n < N; ++n) sum[i][n][0] = sum[i][n][1] = V::zero();
    }
    for (int64_t s = 0; s < whole; ++s) {
      for (int i = 0; i < R; ++i) {
        if (tokens.prefetch) prefetch_ahead(row[i] + s * kStepBytes, kStepBytes);
        step<N>(row[i] + s * kStepBytes, tokens.x, s * kStep, sum[i]);
      }
    }
    if (rest != 0) {
      for (int i = 0; i < R; ++i) {
        uint8_t padded[kStepBytes] = {};
        std::memcpy(padded, row[i] + whole * kStepBytes, static_cast<size_t>(rest * Format::kElementBytes));
        step<N>(padded, tokens.x, whole * kStep, sum[i]);
      }
    }
    for (int i = 0; i < R; ++i) {
      for (int n = 0; n < N; ++n) out[n * out_stride + i] = V::sum(V::add(sum[i][n][0], sum[i][n][1]));
    }
  }

  template <int N>
  static CPU_MOE_INLINE void step(const uint8_t* weights, const float* const* x, int64_t at, V::F32 (*sum)[2]) {
    V::F32 value[2];
    Format::load(weights, value);
    for (int n = 0; n < N; ++n) {
      sum[n][0] = V::fma(value[0], V::load(x[n] + at), sum[n][0]);
      sum[n][1] = V::fma(value[1], V::load(x[n] + at + V::kLanes), sum[n][1]);
    }
  }
};

}  // namespace cpu_moe::CPU_MOE_TIER
