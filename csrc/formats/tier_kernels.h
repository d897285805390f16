// Everything that is compiled once per tier. A tier's translation unit defines CPU_MOE_TIER, opens its target region,
// includes its vocabulary and then this file.
// clang-format off: the order matters, skeletons before formats
#include "planes.h"
#include "int16_planes.h"
#include "e2m1.h"
#include "mxfp4.h"
#include "nvfp4.h"
#include "ds_fp4.h"
#include "fp8_block.h"
#include "q4_0.h"
#include "dense.h"
#include "../simd/math.h"
// clang-format on

namespace cpu_moe::CPU_MOE_TIER {
namespace {

// In registry() order.
constexpr FormatKernels kFormats[] = {
    kernels_of<DenseKernel<Bf16>>(),  kernels_of<DenseKernel<F16>>(),   kernels_of<DenseKernel<F32>>(),
    kernels_of<Int16Kernel<Mxfp4>>(), kernels_of<Int16Kernel<Nvfp4>>(), kernels_of<DsFp4Kernel>(),
    kernels_of<Fp8BlockKernel>(),     kernels_of<Int16Kernel<Q4_0>>(),
};

void combine(const float* const* part, const float* weight, int64_t count, int64_t n, float* out) {
  int64_t i = 0;
  for (; i + V::kLanes <= n; i += V::kLanes) {
    V::F32 sum = V::zero();
    for (int64_t s = 0; s < count; ++s) sum = V::fma(V::load(part[s] + i), V::set(weight[s]), sum);
    V::store(out + i, sum);
  }
  if (i < n) {
    V::F32 sum = V::zero();
    float last[V::kLanes] = {};
    for (int64_t s = 0; s < count; ++s) {
      std::memcpy(last, part[s] + i, static_cast<size_t>(n - i) * sizeof(float));
      sum = V::fma(V::load(last), V::set(weight[s]), sum);
    }
    V::store(last, sum);
    std::memcpy(out + i, last, static_cast<size_t>(n - i) * sizeof(float));
  }
}

void load(DType from, const void* in, int64_t n, float* out) {
  if (from == DType::kF32) {
    std::memcpy(out, in, static_cast<size_t>(n) * sizeof(float));
    return;
  }
  const uint8_t* bytes = static_cast<const uint8_t*>(in);
  if (from == DType::kBF16) {
    for (int64_t i = 0; i < n; ++i) out[i] = bf16_to_f32(read_unaligned<uint16_t>(bytes + 2 * i));
    return;
  }
  int64_t i = 0;
  for (; i + V::kLanes <= n; i += V::kLanes) V::store(out + i, V::load_f16(bytes + 2 * i));
  for (; i < n; ++i) out[i] = f16_to_f32(read_unaligned<uint16_t>(bytes + 2 * i));
}

void store(DType to, const float* in, int64_t n, void* out) {
  uint8_t* bytes = static_cast<uint8_t*>(out);
  if (to == DType::kF32) {
    std::memcpy(out, in, static_cast<size_t>(n) * sizeof(float));
    return;
  }
  int64_t i = 0;
  if (to == DType::kF16) {
    for (; i + V::kLanes <= n; i += V::kLanes) V::store_f16(bytes + 2 * i, V::load(in + i));
  }
  for (; i < n; ++i) {
    const uint16_t half = to == DType::kF16 ? f32_to_f16(in[i]) : f32_to_bf16(in[i]);
    std::memcpy(bytes + 2 * i, &half, sizeof half);
  }
}

// The plain read that bounds every kernel: `Streams` equal ranges side by side, four vectors at a time, summed.
template <int Streams, int64_t Prefetch>
V::I32 read_all(const uint8_t* p, int64_t bytes) {
  constexpr int64_t kChunk = V::kBytes < 32 ? 64 : 4 * V::kBytes;
  const int64_t range = bytes / Streams / kChunk * kChunk;
  V::I32 sum[4] = {V::zero_i32(), V::zero_i32(), V::zero_i32(), V::zero_i32()};
  for (int64_t i = 0; i < range; i += kChunk) {
    for (int s = 0; s < Streams; ++s) {
      const uint8_t* at = p + s * range + i;
      if constexpr (Prefetch != 0) {
        for (int64_t line = 0; line < kChunk; line += 64) V::prefetch(at + line + Prefetch);
      }
      for (int64_t v = 0; v < kChunk / V::kBytes; ++v) {
        sum[v % 4] = V::add(sum[v % 4], V::load_i32(reinterpret_cast<const int32_t*>(at + v * V::kBytes)));
      }
    }
  }
  for (int64_t i = Streams * range; i < bytes; i += V::kBytes) {
    uint8_t last[V::kBytes] = {};
    std::memcpy(last, p + i, static_cast<size_t>(std::min<int64_t>(V::kBytes, bytes - i)));
    sum[0] = V::add(sum[0], V::load_i32(reinterpret_cast<const int32_t*>(last)));
  }
  return V::add(V::add(sum[0], sum[1]), V::add(sum[2], sum[3]));
}

// Which of these is fastest differs between machines, by a factor of two and more: a benchmark tries them all.
constexpr V::I32 (*kReads[])(const uint8_t*, int64_t) = {read_all<1, 0>,    read_all<2, 0>,    read_all<4, 0>,
                                                         read_all<1, 1024>, read_all<1, 4096>, read_all<1, 8192>};
static_assert(std::size(kReads) == kStreamReadVariants);

uint64_t stream_read(const void* data, int64_t bytes, int variant) {
  const V::I32 sum = kReads[variant](static_cast<const uint8_t*>(data), bytes);
  int32_t lanes[V::kLanes];
  V::store_i32(lanes, sum);
  uint64_t total = 0;
  for (int32_t lane : lanes) total += static_cast<uint32_t>(lane);
  return total;
}

}  // namespace

TierKernels kernels() { return {kFormats, glu, combine, load, store, stream_read}; }

}  // namespace cpu_moe::CPU_MOE_TIER
