// quantize and dequantize.
#include <ATen/ops/empty.h>

#include "../moe/routes.h"
#include "../simd/tier.h"
#include "checks.h"
#include "ops.h"
#include "parallel_for.h"

namespace cpu_moe::ops {
Tensor dequantize(TensorList weight, std::string_view format, ScalarType dtype) {
  const int index = parse_format(format, "format");
  TORCH_CHECK_TYPE(dtype == ScalarType::Float || dtype == ScalarType::Half || dtype == ScalarType::BFloat16,
                   "dtype: expected float32, float16 or bfloat16, got ", dtype_name(dtype));
  Logical shape = logical_shape(weight, index, "weight", "R", "C");
  const Weight w = read_weight(weight, index, "weight", shape);
  Tensor out = at::empty({shape.experts, shape.rows, shape.cols}, at::TensorOptions().dtype(dtype).device(at::kCPU));
  uint8_t* to = static_cast<uint8_t*>(out.mutable_data_ptr());
  const DType type = dtype_of(dtype, "dtype");
  const int64_t row_bytes = shape.cols * out.element_size();
  const TierKernels& tier = active_kernels();
  parallel_for(shape.experts * shape.rows, [&](int64_t item) {
    std::vector<float> row(static_cast<size_t>(shape.cols));
    decode_row(w, item / shape.rows, item % shape.rows, row.data());
    tier.store(type, row.data(), shape.cols, to + item * row_bytes);
  });
  return out;
}

std::vector<Tensor> quantize(const Tensor& weight, std::string_view format) {
  const int index = parse_format(format, "format");
  check_cpu(weight, "weight");
  check_no_grad(weight, "weight");
  const ScalarType type = weight.scalar_type();
  // Not float64: it would be rounded twice.
  TORCH_CHECK_TYPE(type == ScalarType::Float || type == ScalarType::Half || type == ScalarType::BFloat16,
                   "weight: expected dtype float32, float16 or bfloat16, got ", dtype_name(type));
  TORCH_CHECK_VALUE(weight.dim() == 3, "weight: expected shape [E, R, C], got ", shape_text(weight.sizes()));
  const int64_t experts = weight.size(0), rows = weight.size(1), cols = weight.size(2);
  const FormatSpec& spec = registry()[static_cast<size_t>(index)];
  TORCH_CHECK_VALUE(cols % spec.block == 0, "weight: format ", spec.name, " needs columns (C) in blocks of ",
                    spec.block, ", got C = ", cols);
  std::vector<Tensor> parts = allocate_parts(index, experts, rows, cols);
  const Weight w = read_weight(parts, index, "weight", {experts, rows, cols, "R", "C"});
  const View2D from = {static_cast<const uint8_t*>(weight.const_data_ptr()), dtype_of(type, "weight"), {0, 0}};
  const int64_t size = weight.element_size();
  parallel_for(experts, [&](int64_t e) {
    std::vector<float> values(static_cast<size_t>(rows * cols));
    View2D matrix = from;
    matrix.data += e * weight.stride(0) * size;
    matrix.stride[0] = weight.stride(1) * size;
    matrix.stride[1] = weight.stride(2) * size;
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < cols; ++c) values[static_cast<size_t>(r * cols + c)] = read_float(matrix, r, c);
    }
    encode_expert(w, e, values.data());
  });
  return parts;
}

}  // namespace cpu_moe::ops
