// Every operator's schema, in one place, and its CPU implementation (that for Autograd: ops/autograd.cpp).
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "ops/ops.h"

TORCH_LIBRARY(cpu_moe, m) {
  m.def(
      "experts(Tensor hidden, Tensor topk_ids, Tensor topk_weights, Tensor[] gate_up, Tensor[] down, str format, *, "
      "str? down_format=None, Tensor? gate_up_bias=None, Tensor? down_bias=None, str activation=\"silu\", "
      "float alpha=1.702, float? limit=None, bool interleaved=False, bool apply_router_weight_on_input=False, "
      "str precision=\"exact\") -> Tensor");
  m.def(
      "experts_out(Tensor hidden, Tensor topk_ids, Tensor topk_weights, Tensor[] gate_up, Tensor[] down, str format, "
      "*, "
      "str? down_format=None, Tensor? gate_up_bias=None, Tensor? down_bias=None, str activation=\"silu\", "
      "float alpha=1.702, float? limit=None, bool interleaved=False, bool apply_router_weight_on_input=False, "
      "str precision=\"exact\", Tensor(a!) out) -> ()");
  m.def("dequantize(Tensor[] weight, str format, *, ScalarType dtype) -> Tensor");
  m.def("quantize(Tensor weight, str format) -> Tensor[]");
  m.def("stream_read(Tensor data, int variant=0) -> int");

  // Without tensors there is nothing to dispatch on.
  m.def("stream_read_variants() -> int", &cpu_moe::ops::stream_read_variants);
  m.def("set_num_threads(int n) -> ()", &cpu_moe::ops::set_num_threads);
  m.def("get_num_threads() -> int", &cpu_moe::ops::get_num_threads);
  m.def("tiers() -> str", &cpu_moe::ops::tiers);
  m.def("set_tier(str name) -> ()", &cpu_moe::ops::set_tier);
  m.def("formats() -> str", &cpu_moe::ops::formats);
  m.def("system_info() -> str", &cpu_moe::ops::system_info);
}

TORCH_LIBRARY_IMPL(cpu_moe, CPU, m) {
  m.impl("experts", &cpu_moe::ops::experts);
  m.impl("experts_out", &cpu_moe::ops::experts_out);
  m.impl("dequantize", &cpu_moe::ops::dequantize);
  m.impl("quantize", &cpu_moe::ops::quantize);
  m.impl("stream_read", &cpu_moe::ops::stream_read);
}
