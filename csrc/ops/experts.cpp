// experts and experts_out: check the tensors, fill moe/'s plain structs, call it.
#include <ATen/ops/empty.h>

#include <cmath>
#include <utility>

#include "../moe/routes.h"
#include "checks.h"
#include "ops.h"
#include "torch_threads.h"

namespace cpu_moe::ops {
namespace {

void check_float(const Tensor& t, const char* name, bool allow_f64) {
  const ScalarType type = t.scalar_type();
  TORCH_CHECK_TYPE(type == ScalarType::Float || type == ScalarType::Half || type == ScalarType::BFloat16 ||
                       (allow_f64 && type == ScalarType::Double),
                   name, ": expected dtype ",
                   allow_f64 ? "float32, float16, bfloat16 or float64" : "float32, float16 or bfloat16", ", got ",
                   dtype_name(type));
}

View2D read_bias(const std::optional<Tensor>& bias, const char* name, int64_t experts, int64_t n, const char* letters) {
  if (!bias.has_value() || !bias->defined()) return {};
  check_cpu(*bias, name);
  check_float(*bias, name, false);
  check_no_grad(*bias, name);
  TORCH_CHECK_VALUE(bias->dim() == 2 && bias->size(0) == experts && bias->size(1) == n, name, ": expected shape [",
                    experts, ", ", n, "] (E, ", letters, "), got ", shape_text(bias->sizes()));
  return view2d(*bias);
}

// Whether the address ranges of two tensors (strides are never negative) meet.
bool overlap(const Tensor& a, const Tensor& b) {
  const auto range = [](const Tensor& t) {
    const char* first = static_cast<const char*>(t.const_data_ptr());
    int64_t last = 0;
    for (int64_t d = 0; d < t.dim(); ++d) last += (t.size(d) - 1) * t.stride(d);
    return std::pair{first, first + (last + 1) * t.element_size()};
  };
  if (a.numel() == 0 || b.numel() == 0) return false;
  const auto [a_first, a_end] = range(a);
  const auto [b_first, b_end] = range(b);
  return a_first < b_end && b_first < a_end;
}

// Ids are checked in one pass before any weight is read; an int64 is compared whole.
void check_ids(const Experts& call) {
  for (int64_t t = 0; t < call.tokens; ++t) {
    for (int64_t s = 0; s < call.top_k; ++s) {
      const int64_t id = read_id(call, t, s);
      TORCH_CHECK_INDEX(id < call.experts, "topk_ids[", t, ", ", s, "]: expected an expert id below ", call.experts,
                        " (the bank's experts) or negative (skipped), got ", id);
    }
  }
}

void compute(const Experts& call) {
  as_value_error([&] { run_beside_torch([&] { run_experts(call); }); });
}

}  // namespace

static Experts check_call(const Tensor& hidden, const Tensor& topk_ids, const Tensor& topk_weights, TensorList gate_up,
                          TensorList down, std::string_view format, std::optional<std::string_view> down_format,
                          const std::optional<Tensor>& gate_up_bias, const std::optional<Tensor>& down_bias,
                          std::string_view activation, double alpha, std::optional<double> limit, bool interleaved,
                          bool weight_on_input, std::string_view precision) {
  check_cpu(hidden, "hidden");
  check_cpu(topk_ids, "topk_ids");
  check_cpu(topk_weights, "topk_weights");
  check_float(hidden, "hidden", false);
  check_float(topk_weights, "topk_weights", true);
  TORCH_CHECK_TYPE(topk_ids.scalar_type() == ScalarType::Int || topk_ids.scalar_type() == ScalarType::Long,
                   "topk_ids: expected dtype int32 or int64, got ", dtype_name(topk_ids.scalar_type()));
  check_no_grad(hidden, "hidden");
  check_no_grad(topk_weights, "topk_weights");
  TORCH_CHECK_VALUE(hidden.dim() == 2, "hidden: expected shape [M, H], got ", shape_text(hidden.sizes()));
  TORCH_CHECK_VALUE(topk_ids.dim() == 2 && topk_ids.size(0) == hidden.size(0) && topk_ids.size(1) >= 1,
                    "topk_ids: expected shape [", hidden.size(0), ", k] (M, k) with k >= 1, got ",
                    shape_text(topk_ids.sizes()));
  TORCH_CHECK_VALUE(topk_weights.sizes() == topk_ids.sizes(), "topk_weights: expected the shape of topk_ids, ",
                    shape_text(topk_ids.sizes()), " (M, k), got ", shape_text(topk_weights.sizes()));

  Experts call;
  const int gate_up_format = parse_format(format, "format");
  const int down_format_index = down_format.has_value() ? parse_format(*down_format, "down_format") : gate_up_format;
  call.activation = parse_activation(activation);
  call.precision = parse_precision(precision);
  const bool clamps = call.activation == Activation::kSwigluOai || call.activation == Activation::kSwigluClamp;
  if (limit.has_value()) {
    TORCH_CHECK_VALUE(clamps, "limit: activation '", activation,
                      "' takes no limit (swigluoai and swiglu_clamp do), got ", *limit);
    TORCH_CHECK_VALUE(*limit > 0, "limit: expected a number above 0, or None for no clamp, got ", *limit);
    call.limit = static_cast<float>(*limit);
  }
  TORCH_CHECK_VALUE(std::isfinite(static_cast<float>(alpha)), "alpha: expected a finite float32, got ", alpha);
  call.alpha = static_cast<float>(alpha);

  call.tokens = hidden.size(0);
  call.hidden = hidden.size(1);
  call.top_k = topk_ids.size(1);
  const Logical up = logical_shape(gate_up, gate_up_format, "gate_up", "2I", "H");
  logical_shape(down, down_format_index, "down", "H", "I");
  call.experts = up.experts;
  TORCH_CHECK_VALUE(up.rows % 2 == 0, "gate_up[0]: expected an even number of rows (2I: gate and up), got shape ",
                    shape_text(gate_up[0].sizes()));
  call.intermediate = up.rows / 2;
  TORCH_CHECK_VALUE(call.intermediate > 0, "gate_up[0]: expected at least one pair of gate and up rows, got shape ",
                    shape_text(gate_up[0].sizes()));
  TORCH_CHECK_VALUE(call.hidden > 0, "hidden: expected H >= 1, got shape ", shape_text(hidden.sizes()));
  // The remaining shapes follow from these three numbers.
  call.gate_up = read_weight(gate_up, gate_up_format, "gate_up", {up.experts, up.rows, call.hidden, "2I", "H"});
  call.down = read_weight(down, down_format_index, "down", {up.experts, call.hidden, call.intermediate, "H", "I"});
  call.gate_up_bias = read_bias(gate_up_bias, "gate_up_bias", call.experts, 2 * call.intermediate, "2I");
  call.down_bias = read_bias(down_bias, "down_bias", call.experts, call.hidden, "H");
  call.interleaved = interleaved;
  call.weight_on_input = weight_on_input;
  TORCH_CHECK_VALUE(
      !weight_on_input || call.top_k == 1,
      "apply_router_weight_on_input: expected k = 1, since one input serves all of a token's experts; got k = ",
      call.top_k);
  call.input = view2d(hidden);
  call.ids = view2d(topk_ids);
  call.route_weight = view2d(topk_weights);
  check_ids(call);
  return call;
}

Tensor experts(const Tensor& hidden, const Tensor& topk_ids, const Tensor& topk_weights, TensorList gate_up,
               TensorList down, std::string_view format, std::optional<std::string_view> down_format,
               const std::optional<Tensor>& gate_up_bias, const std::optional<Tensor>& down_bias,
               std::string_view activation, double alpha, std::optional<double> limit, bool interleaved,
               bool apply_router_weight_on_input, std::string_view precision) {
  Experts call = check_call(hidden, topk_ids, topk_weights, gate_up, down, format, down_format, gate_up_bias, down_bias,
                            activation, alpha, limit, interleaved, apply_router_weight_on_input, precision);
  Tensor out = at::empty({call.tokens, call.hidden}, hidden.options().memory_format(at::MemoryFormat::Contiguous));
  call.output = static_cast<uint8_t*>(out.mutable_data_ptr());
  call.output_stride = call.hidden * out.element_size();
  compute(call);
  return out;
}

void experts_out(const Tensor& hidden, const Tensor& topk_ids, const Tensor& topk_weights, TensorList gate_up,
                 TensorList down, std::string_view format, std::optional<std::string_view> down_format,
                 const std::optional<Tensor>& gate_up_bias, const std::optional<Tensor>& down_bias,
                 std::string_view activation, double alpha, std::optional<double> limit, bool interleaved,
                 bool apply_router_weight_on_input, std::string_view precision, Tensor& out) {
  Experts call = check_call(hidden, topk_ids, topk_weights, gate_up, down, format, down_format, gate_up_bias, down_bias,
                            activation, alpha, limit, interleaved, apply_router_weight_on_input, precision);
  check_cpu(out, "out");
  check_no_grad(out, "out");
  TORCH_CHECK_TYPE(out.scalar_type() == hidden.scalar_type(), "out: expected the dtype of hidden, ",
                   dtype_name(hidden.scalar_type()), ", got ", dtype_name(out.scalar_type()));
  TORCH_CHECK_VALUE(out.dim() == 2 && out.size(0) == call.tokens && out.size(1) == call.hidden, "out: expected shape [",
                    call.tokens, ", ", call.hidden, "] (M, H), got ", shape_text(out.sizes()));
  TORCH_CHECK_VALUE((out.size(1) == 1 || out.stride(1) == 1) && (out.size(0) <= 1 || out.stride(0) >= out.size(1)),
                    "out: expected contiguous rows that do not overlap, got strides ", shape_text(out.strides()));
  // All inputs may be read after the first output is written.
  const auto apart = [&out](const Tensor& t, const std::string& name) {
    TORCH_CHECK_VALUE(!overlap(out, t), "out: overlaps ", name, " in memory; expected a tensor of its own");
  };
  apart(hidden, "hidden");
  apart(topk_ids, "topk_ids");
  apart(topk_weights, "topk_weights");
  for (size_t i = 0; i < gate_up.size(); ++i) apart(gate_up[i], "gate_up[" + std::to_string(i) + "]");
  for (size_t i = 0; i < down.size(); ++i) apart(down[i], "down[" + std::to_string(i) + "]");
  if (gate_up_bias.has_value() && gate_up_bias->defined()) apart(*gate_up_bias, "gate_up_bias");
  if (down_bias.has_value() && down_bias->defined()) apart(*down_bias, "down_bias");
  call.output = static_cast<uint8_t*>(out.mutable_data_ptr());
  call.output_stride = out.stride(0) * out.element_size();
  compute(call);
}

}  // namespace cpu_moe::ops
