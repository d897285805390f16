// One MoE layer's routed experts: routes -> work items -> phases. Knows no format, no tier and no torch.
#pragma once

#include <cstdint>
#include <limits>

#include "../formats/format.h"

namespace cpu_moe {

// A strided view of floats, for biases and other small inputs; strides in bytes.
struct View2D {
  const uint8_t* data = nullptr;  // null: absent
  DType dtype = DType::kF32;
  int64_t stride[2] = {0, 0};
};

struct Experts {
  int64_t tokens = 0, top_k = 0, experts = 0, hidden = 0, intermediate = 0;  // M, k, E, H, I
  View2D input;                                                              // [M, H]: f32, f16, bf16
  View2D ids;           // [M, k]: i32, i64, all < experts; negative: skipped
  View2D route_weight;  // [M, k]: f32, f16, bf16, f64
  Weight gate_up, down;
  View2D gate_up_bias, down_bias;  // [E, 2I], [E, H]: f32, f16, bf16
  Activation activation = Activation::kSilu;
  float alpha = 1.702f;
  float limit = std::numeric_limits<float>::infinity();
  bool interleaved = false;
  bool weight_on_input = false;
  Precision precision = Precision::kExact;
  uint8_t* output = nullptr;  // [M, H] of input.dtype, contiguous rows
  int64_t output_stride = 0;  // bytes
};

// Computes the layer on the pool. A token's bits depend on nothing but its own row, ids and weights. Scratch memory is
// bounded (see kScratchBytes in layer.cpp): larger calls go in several rounds of tokens. Throws std::bad_alloc with the
// output untouched or holding whole tokens only.
void run_experts(const Experts& call);

}  // namespace cpu_moe
