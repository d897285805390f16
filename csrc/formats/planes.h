// Shared by the formats' headers: activation planes, prefetch, and the fallback for activations that fit none.
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
constexpr int exponent_of(uint32_t magnitude) {
  if (magnitude == 0) return 0;
  return magnitude >> 23 ? static_cast<int>(magnitude >> 23) - 127 : 31 - std::countl_zero(magnitude) - 149;
}

constexpr bool finite(uint32_t magnitude) { return magnitude < 0x7F800000; }
inline bool all_finite(const float* x, int64_t n) { return finite(max_magnitude_bits(x, n)); }

// The smallest magnitude of n floats that is not 0, as its bits; UINT32_MAX where all are 0.
inline uint32_t min_magnitude_bits(const float* x, int64_t n) {
  uint32_t least = UINT32_MAX;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t below = (std::bit_cast<uint32_t>(x[i]) & 0x7FFFFFFF) - 1;  // 0 becomes the largest
    least = below < least ? below : least;
  }
  return least == UINT32_MAX ? least : least + 1;
}

inline int write_raw_plane(const float* x, int64_t cols, uint8_t* out) {
  PlaneHeader h;
  h.raw = max_magnitude_bits(x, cols) > 0x7F800000 ? PlaneHeader::kNaN : PlaneHeader::kPlain;
  std::memcpy(out, &h, sizeof h);
  std::memcpy(body(out), x, static_cast<size_t>(cols) * sizeof(float));
  return 1;
}

// Plain arithmetic for tokens with infinities or NaNs, or of a range that a format's planes cannot hold. A NaN times
// any weight is one, so no weight is read for those (rows of padding may well hold them); the others are rare, so
// simple.
inline void dot_raw(const Weight& w, int64_t expert, const int32_t* rows, int64_t row_count,
                    const uint8_t* const* planes, int64_t count, float* out, int64_t out_stride) {
  bool any = false;
  for (int64_t p = 0; p < count; ++p) {
    any |= header(planes[p]).raw == PlaneHeader::kPlain;
    std::fill_n(out + p * out_stride, row_count, std::numeric_limits<float>::quiet_NaN());
  }
  if (!any) return;
  std::vector<double> decoded(static_cast<size_t>(w.cols));
  for (int64_t j = 0; j < row_count; ++j) {
    decode_row(w, expert, rows[j], decoded.data());
    for (int64_t p = 0; p < count; ++p) {
      if (header(planes[p]).raw != PlaneHeader::kPlain) continue;
      const float* x = reinterpret_cast<const float*>(body(planes[p]));
      double sum = 0;
      for (int64_t c = 0; c < w.cols; ++c) {
        sum += decoded[static_cast<size_t>(c)] * static_cast<double>(x[c]);
      }
      out[p * out_stride + j] = static_cast<float>(sum);
    }
  }
}

// How far ahead of its reads a kernel's software prefetch runs, for kernels whose arithmetic leaves the hardware's
// prefetcher too few reads to work with. Every line is asked for, or none: some of them confuse that prefetcher. Rows
// follow each other, so beyond a row's end lies what is read next (docs/performance.md has the measurements).
constexpr int64_t kPrefetchBytes = 4096;

// For the next `bytes` (whole lines, or a line more) that are read from `here`.
CPU_MOE_INLINE void prefetch_ahead(const uint8_t* here, int64_t bytes) {
  for (int64_t line = 0; line < bytes; line += 64) V::prefetch(here + kPrefetchBytes + line);
}

// Runs the kernel on tokens planes[0..N), R rows at a time.
template <class Kernel, int N, int R>
inline void dot_tokens(const Weight& w, int64_t expert, const int32_t* rows, int64_t count,
                       const uint8_t* const* planes, float* out, int64_t out_stride) {
  const typename Kernel::template Tokens<N> tokens(w.cols, planes);
  int64_t j = 0;
  if constexpr (R > 1) {
    for (; j + R <= count; j += R) Kernel::template dot<N, R>(w, expert, rows + j, tokens, out + j, out_stride);
  }
  for (; j < count; ++j) Kernel::template dot<N, 1>(w, expert, rows + j, tokens, out + j, out_stride);
}

// The same for n tokens, n <= N, with as many rows at a time as suit one token or several.
template <class Kernel, int N>
inline void dot_up_to(int64_t n, const Weight& w, int64_t expert, const int32_t* rows, int64_t row_count,
                      const uint8_t* const* planes, float* out, int64_t out_stride) {
  if constexpr (N > 1) {
    if (n < N) return dot_up_to<Kernel, N - 1>(n, w, expert, rows, row_count, planes, out, out_stride);
  }
  dot_tokens<Kernel, N, Kernel::rows_at_once(N)>(w, expert, rows, row_count, planes, out, out_stride);
}

// All planes, up to kTokens at a time so that a decoded weight serves them from registers, and all rows. The
// arithmetic per plane and row is the same whatever shares the pass: results do not depend on which tokens share a
// call.
template <class Kernel>
inline void dot_planes(const Weight& w, int64_t expert, const int32_t* rows, int64_t row_count,
                       const uint8_t* const* planes, int64_t count, float* out, int64_t out_stride) {
  constexpr int64_t kTokens = Kernel::kTokens;
  int64_t p = 0;
  while (p < count) {
    float* to = out + p * out_stride;
    int64_t raw = 0;
    while (p + raw < count && header(planes[p + raw]).raw != PlaneHeader::kNo) ++raw;
    if (raw != 0) {
      dot_raw(w, expert, rows, row_count, planes + p, raw, to, out_stride);
      p += raw;
      continue;
    }
    int64_t run = 1;
    while (p + run < count && header(planes[p + run]).raw == PlaneHeader::kNo) ++run;
    // As few passes as can be, all of about the same size: none for a lonely token.
    const int64_t passes = (run + kTokens - 1) / kTokens;
    const int64_t n = (run + passes - 1) / passes;
    dot_up_to<Kernel, Kernel::kTokens>(n, w, expert, rows, row_count, planes + p, to, out_stride);
    p += n;
  }
}

template <class Kernel>
constexpr FormatKernels kernels_of() {
  return {Kernel::kStreams, Kernel::plane_bytes, Kernel::prepare, dot_planes<Kernel>};
}

}  // namespace cpu_moe::CPU_MOE_TIER
