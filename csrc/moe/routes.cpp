#include "routes.h"

#include "../simd/float_bits.h"

namespace cpu_moe {

int64_t read_id(const Experts& call, int64_t token, int64_t slot) {
  const uint8_t* at = call.ids.data + token * call.ids.stride[0] + slot * call.ids.stride[1];
  return call.ids.dtype == DType::kI64 ? read_unaligned<int64_t>(at) : read_unaligned<int32_t>(at);
}

float read_float(const View2D& view, int64_t i, int64_t j) {
  const uint8_t* at = view.data + i * view.stride[0] + j * view.stride[1];
  switch (view.dtype) {
    case DType::kF32:
      return read_unaligned<float>(at);
    case DType::kF64:
      return static_cast<float>(read_unaligned<double>(at));
    case DType::kBF16:
      return bf16_to_f32(read_unaligned<uint16_t>(at));
    default:
      return f16_to_f32(read_unaligned<uint16_t>(at));
  }
}

void collect_routes(const Experts& call, int64_t first, int64_t count, Routes& out) {
  out.of_token.assign(static_cast<size_t>(count * call.top_k), -1);
  out.groups.clear();
  // Counting sort: slots of one expert stay in the order of (token, slot).
  std::vector<int64_t> next(static_cast<size_t>(call.experts) + 1, 0);
  for (int64_t t = 0; t < count; ++t) {
    for (int64_t s = 0; s < call.top_k; ++s) {
      const int64_t id = read_id(call, first + t, s);
      if (id >= 0) ++next[static_cast<size_t>(id) + 1];
    }
  }
  for (int64_t e = 0; e < call.experts; ++e) {
    const int64_t n = next[static_cast<size_t>(e) + 1];
    if (n > 0) out.groups.push_back({e, next[static_cast<size_t>(e)], n});
    next[static_cast<size_t>(e) + 1] += next[static_cast<size_t>(e)];
  }
  out.routes.resize(static_cast<size_t>(next.back()));
  for (int64_t t = 0; t < count; ++t) {
    for (int64_t s = 0; s < call.top_k; ++s) {
      const int64_t id = read_id(call, first + t, s);
      if (id < 0) continue;  // its weight is not even read
      const int64_t at = next[static_cast<size_t>(id)]++;
      out.routes[static_cast<size_t>(at)] = {static_cast<int32_t>(t), static_cast<int32_t>(s),
                                             read_float(call.route_weight, first + t, s)};
      out.of_token[static_cast<size_t>(t * call.top_k + s)] = static_cast<int32_t>(at);
    }
  }
}

}  // namespace cpu_moe
