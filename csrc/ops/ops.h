// The operators' implementations for CPU tensors; library.cpp registers them under their schemas.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace cpu_moe::ops {

at::Tensor experts(const at::Tensor& hidden, const at::Tensor& topk_ids, const at::Tensor& topk_weights,
                   at::TensorList gate_up, at::TensorList down, std::string_view format,
                   std::optional<std::string_view> down_format, const std::optional<at::Tensor>& gate_up_bias,
                   const std::optional<at::Tensor>& down_bias, std::string_view activation, double alpha,
                   std::optional<double> limit, bool interleaved, bool apply_router_weight_on_input,
                   std::string_view precision);
void experts_out(const at::Tensor& hidden, const at::Tensor& topk_ids, const at::Tensor& topk_weights,
                 at::TensorList gate_up, at::TensorList down, std::string_view format,
                 std::optional<std::string_view> down_format, const std::optional<at::Tensor>& gate_up_bias,
                 const std::optional<at::Tensor>& down_bias, std::string_view activation, double alpha,
                 std::optional<double> limit, bool interleaved, bool apply_router_weight_on_input,
                 std::string_view precision, at::Tensor& out);

at::Tensor dequantize(at::TensorList weight, std::string_view format, at::ScalarType dtype);
std::vector<at::Tensor> quantize(const at::Tensor& weight, std::string_view format);

int64_t stream_read(const at::Tensor& data, int64_t variant);
int64_t stream_read_variants();
void set_num_threads(int64_t n);
int64_t get_num_threads();
std::string tiers();
void set_tier(std::string_view name);
std::string formats();
std::string system_info();

}  // namespace cpu_moe::ops
