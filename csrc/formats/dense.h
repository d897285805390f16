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
  static void dot(const Weight& w, int64_t expert, int64_t row0, int64_t rows, const uint8_t* const* planes, float* out,
                  int64_t out_stride, const Ahead& ahead) {
    constexpr int64_t kStepBytes = kStep * Format::kElementBytes;
    const int64_t whole = w.cols / kStep;
    const int64_t rest = w.cols % kStep;
    const float* x[N];
    for (int n = 0; n < N; ++n) x[n] = reinterpret_cast<const float*>(body(planes[n]));
    for (int64_t r = 0; r < rows; ++r) {
      const uint8_t* row = w.row(0, expert, row0 + r);
      const uint8_t* next = prefetch_base(w, 0, expert, row0, rows, r, ahead);
      V::F32 sum[N][4];
      for (int n = 0; n < N; ++n) {
        for (auto& s : sum[n]) s = V::zero();
      }
      int64_t i = 0;
      // Two steps at a time: four sums a token hide the latency of the additions.
      for (; i + 2 <= whole; i += 2) {
        for (int64_t line = 0; line < 2 * kStepBytes; line += 64) V::prefetch(next + i * kStepBytes + line);
        step<N, 0>(row + i * kStepBytes, x, i * kStep, sum);
        step<N, 2>(row + (i + 1) * kStepBytes, x, (i + 1) * kStep, sum);
      }
      if (i < whole) step<N, 0>(row + i * kStepBytes, x, i * kStep, sum);
      if (rest != 0) {
        uint8_t padded[kStepBytes] = {};
        std::memcpy(padded, row + whole * kStepBytes, static_cast<size_t>(rest * Format::kElementBytes));
        step<N, 2>(padded, x, whole * kStep, sum);
      }
      for (int n = 0; n < N; ++n) {
        out[n * out_stride + r] = V::sum(V::add(V::add(sum[n][0], sum[n][1]), V::add(sum[n][2], sum[n][3])));
      }
    }
  }

  template <int N, int S>
  static CPU_MOE_INLINE void step(const uint8_t* weights, const float* const* x, int64_t at, V::F32 (*sum)[4]) {
    V::F32 value[2];
    Format::load(weights, value);
    for (int n = 0; n < N; ++n) {
      sum[n][S] = V::fma(value[0], V::load(x[n] + at), sum[n][S]);
      sum[n][S + 1] = V::fma(value[1], V::load(x[n] + at + V::kLanes), sum[n][S + 1]);
    }
  }
};

}  // namespace cpu_moe::CPU_MOE_TIER
