// What the rest of the library knows of a weight format: its description (registry.cpp) and its kernels (one table a
// tier).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace cpu_moe {

// Element types, as far as the operators distinguish them.
enum class DType : uint8_t { kF32, kF16, kBF16, kF64, kE4M3, kU8, kI32, kI64 };
constexpr int64_t size_of(DType t) {
  constexpr int64_t kSize[] = {4, 2, 2, 8, 1, 1, 4, 8};
  return kSize[static_cast<int>(t)];
}

enum class Precision : uint8_t { kExact, kFast };

// One tensor of a projection [E, R, C]. Its shape is [E, ceil(R / row_block)] or, where it has columns,
// [E, ceil(R / row_block), ceil(C / col_block) * col_bytes_per_block].
struct PartSpec {
  std::string_view name;
  DType dtypes[2];  // the accepted ones; the same twice where there is one
  int row_block = 1;
  int col_block = 1;  // 0: no column dimension
  int col_units = 1;  // entries per col_block columns
  bool any_strides = false;
};

constexpr int kMaxParts = 3;

struct FormatSpec {
  std::string_view name;
  int block;  // C must be a multiple
  int part_count;
  PartSpec parts[kMaxParts];
};

// One projection [E, rows, cols] of a bank, read in place.
struct Weight {
  int format = 0;  // index into registry()
  int64_t rows = 0;
  int64_t cols = 0;
  const uint8_t* part[kMaxParts] = {};
  int64_t expert_stride[kMaxParts] = {};  // bytes
  DType dtype[kMaxParts] = {};            // of each part
  int64_t row_stride[kMaxParts] = {};     // bytes; only any_strides parts differ from contiguous
  int64_t col_stride[kMaxParts] = {};     // bytes
  const uint8_t* row(int p, int64_t expert, int64_t r) const {
    return part[p] + expert * expert_stride[p] + r * row_stride[p];
  }
};

constexpr int kMaxStreams = 2;  // see FormatKernels::streams

// A token's activations as a kernel wants them: a "plane" begins with this header, the format's own layout follows.
// A token has one plane, or two where the second carries what the first's 16-bit integers could not hold (see
// int16_planes.h).
struct PlaneHeader {
  double rescale = 1.0;   // multiplies the result, for formats with a second weight scale
  float unit = 1.0f;      // multiplies (weight scale * activation scale)
  float sum_unit = 1.0f;  // multiplies the integer sums, for formats whose scales fill float32's range
  // E8M0 codes of weights for which (weight scale * activation scale) is a normal number in every block; a row with
  // others, or with the NaN, is computed with care.
  int32_t least_code = 0;
  int32_t most_code = 254;
  int32_t zero = 0;  // 1: all activations are 0 (fp8_block)
  // kPlain: the float32 values follow as they are, for plain arithmetic in double.
  enum Raw : int32_t { kNo, kPlain, kNaN } raw = kNo;
};
constexpr int64_t kPlaneHeaderBytes = 64;  // a cache line, so that what follows is aligned
static_assert(sizeof(PlaneHeader) <= kPlaneHeaderBytes);

struct FormatKernels {
  // Rows that are read at the same time for one token. A kernel with little arithmetic is bound by the misses that a
  // core keeps in flight, and two places far apart, each followed by the hardware's prefetcher, keep more of them than
  // one. So consecutive entries of dot()'s list should come from as many places, each of which goes on where it left
  // off (docs/performance.md has the measurements).
  int streams;
  // Bytes of one plane for `cols` columns.
  int64_t (*plane_bytes)(int64_t cols);
  // Writes one or two planes (the second at out + plane_bytes) from cols floats; returns how many.
  int (*prepare)(const float* x, int64_t cols, Precision precision, uint8_t* out);
  // out[p * out_stride + j] = dot(weight row rows[j], plane p), j < row_count, p < planes.
  void (*dot)(const Weight& w, int64_t expert, const int32_t* rows, int64_t row_count, const uint8_t* const* planes,
              int64_t count, float* out, int64_t out_stride);
};

// Whether the dense formats' rows are prefetched by software as well (simd/tier.cpp). The other formats' always are.
bool prefetch_dense_rows();

enum class Activation : uint8_t { kSilu, kGelu, kGeluTanh, kRelu2, kSwigluOai, kSwigluClamp };

// Everything that is compiled once per tier.
struct TierKernels {
  const FormatKernels* formats;  // in registry() order
  // out[i] = activation(gate[i]) * up[i]; limit is infinity for none.
  void (*glu)(Activation activation, float alpha, float limit, const float* gate, const float* up, int64_t n,
              float* out);
  // out[i] = sum over s of weight[s] * part[s][i], in the order of s.
  void (*combine)(const float* const* part, const float* weight, int64_t count, int64_t n, float* out);
  void (*load)(DType from, const void* in, int64_t n, float* out);  // f32, f16, bf16, contiguous
  void (*store)(DType to, const float* in, int64_t n, void* out);
  uint64_t (*stream_read)(const void* data, int64_t bytes, int variant);
};
constexpr int kStreamReadVariants = 6;

// The one table of formats: index = Weight::format.
std::span<const FormatSpec> registry();
int find_format(std::string_view name);  // -1: none

// Reference decode and encode of whole rows, in plain C++ (codecs.cpp). decode_row writes w.cols values, which
// doubles hold exactly.
void decode_row(const Weight& w, int64_t expert, int64_t row, float* out);
void decode_row(const Weight& w, int64_t expert, int64_t row, double* out);
// Encodes rows of one expert matrix [rows, cols]; w's parts are written (they are contiguous and owned by the caller).
void encode_expert(const Weight& w, int64_t expert, const float* values);

}  // namespace cpu_moe
