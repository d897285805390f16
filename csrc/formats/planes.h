// Shared by the formats' headers: activation planes, prefetch, and the fallback for activations that are not finite.
// Included inside a tier's target region and namespace; V is the tier's vector vocabulary.
#pragma once

namespace cpu_moe::CPU_MOE_TIER {

constexpr int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

CPU_MOE_INLINE const PlaneHeader& header(const uint8_t* plane) { return *reinterpret_cast<const PlaneHeader*>(plane); }
CPU_MOE_INLINE const uint8_t* body(const uint8_t* plane) { return plane + kPlaneHeaderBytes; }
CPU_MOE_INLINE uint8_t* body(uint8_t* plane) { return plane + kPlaneHeaderBytes; }

// The largest magnitude of n floats, as its bits: those of a NaN are the largest, then infinity's.
inline uint32_t max_magnitude_bits(const float* x, int64_t n) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t magnitude = std::bit_cast<uint32_t>(x[i]) & 0x7FFFFFFF;
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

// floor(log2) of a finite magnitude given as bits, subnormals included; 0 for 0.
inline int exponent_of(uint32_t magnitude) {
  if (magnitude == 0) return 0;
  return magnitude >> 23 ? static_cast<int>(magnitude >> 23) - 127 : 31 - std::countl_zero(magnitude) - 149;
}

inline bool all_finite(const float* x, int64_t n) { return max_magnitude_bits(x, n) < 0x7F800000; }

inline int write_raw_plane(const float* x, int64_t cols, uint8_t* out) {
  PlaneHeader h;
  h.raw = 1;
  std::memcpy(out, &h, sizeof h);
  std::memcpy(body(out), x, static_cast<size_t>(cols) * sizeof(float));
  return 1;
}

// IEEE semantics for a token with infinities or NaNs; rare, so simple.
inline float dot_raw(const Weight& w, int64_t expert, int64_t row, const uint8_t* plane, float* decoded) {
  decode_row(w, expert, row, decoded);
  const float* x = reinterpret_cast<const float*>(body(plane));
  double sum = 0;
  for (int64_t c = 0; c < w.cols; ++c) sum += static_cast<double>(decoded[c]) * static_cast<double>(x[c]);
  return static_cast<float>(sum);
}

// How far ahead of the reads the software prefetch runs. Not swept yet: docs/performance.md.
constexpr int64_t kPrefetchBytes = 4096;

// Where to prefetch while row `r` of a run of `rows` is read: kPrefetchBytes on, in the run or in what follows it.
CPU_MOE_INLINE const uint8_t* prefetch_base(const Weight& w, int part, int64_t expert, int64_t row0, int64_t rows,
                                            int64_t r, const Ahead& ahead) {
  const int64_t row_bytes = w.row_stride[part];
  const uint8_t* here = w.row(part, expert, row0 + r) + kPrefetchBytes;
  const int64_t past_end = (r * row_bytes + kPrefetchBytes) - rows * row_bytes;
  if (past_end < 0 || ahead.weight == nullptr) return here;
  return ahead.weight->row(part, ahead.expert, ahead.row) + past_end;
}

// Runs Kernel::dot<N> over the planes, N of them at a time so that a decoded weight serves N tokens from registers. The
// arithmetic per plane is the same for every N: results do not depend on which tokens share a call.
template <class Kernel>
inline void dot_planes(const Weight& w, int64_t expert, int64_t row0, int64_t rows, const uint8_t* const* planes,
                       int64_t count, float* out, int64_t out_stride, const Ahead& ahead) {
  const Ahead none;
  std::vector<float> decoded;
  int64_t p = 0;
  while (p < count) {
    if (header(planes[p]).raw) {
      decoded.resize(static_cast<size_t>(w.cols));
      for (int64_t r = 0; r < rows; ++r) {
        out[p * out_stride + r] = dot_raw(w, expert, row0 + r, planes[p], decoded.data());
      }
      ++p;
      continue;
    }
    int64_t n = 1;
    while (n < 4 && p + n < count && !header(planes[p + n]).raw) ++n;
    const Ahead& next = p == 0 ? ahead : none;  // later passes read what is in cache already
    float* to = out + p * out_stride;
    if (n == 4) {
      Kernel::template dot<4>(w, expert, row0, rows, planes + p, to, out_stride, next);
    } else if (n == 3) {
      Kernel::template dot<3>(w, expert, row0, rows, planes + p, to, out_stride, next);
    } else if (n == 2) {
      Kernel::template dot<2>(w, expert, row0, rows, planes + p, to, out_stride, next);
    } else {
      Kernel::template dot<1>(w, expert, row0, rows, planes + p, to, out_stride, next);
    }
    p += n;
  }
}

template <class Kernel>
constexpr FormatKernels kernels_of() {
  return {Kernel::plane_bytes, Kernel::prepare, dot_planes<Kernel>};
}

}  // namespace cpu_moe::CPU_MOE_TIER
