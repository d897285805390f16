// Checks of the operators' arguments, and the way from tensors to the plain structs of moe/. Every message names the
// argument, says what came and what was expected; all of them are raised before anything is written.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <stdexcept>
#include <string>
#include <string_view>

#include "../formats/format.h"
#include "../moe/layer.h"

namespace cpu_moe::ops {

using at::IntArrayRef;
using at::ScalarType;
using at::Tensor;
using at::TensorList;

inline std::string shape_text(IntArrayRef shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

// std::invalid_argument of the torch-free layers becomes ValueError.
template <class F>
auto as_value_error(F f) {
  try {
    return f();
  } catch (const std::invalid_argument& e) {
    TORCH_CHECK_VALUE(false, e.what());
  }
}

DType dtype_of(ScalarType type, const std::string& name);  // TypeError for anything DType does not know
ScalarType scalar_type_of(DType type);
std::string dtype_name(DType type);  // as torch spells it: "float32"
std::string dtype_name(ScalarType type);

void check_cpu(const Tensor& t, const std::string& name);
void check_no_grad(const Tensor& t, const std::string& name);

int parse_format(std::string_view name, const char* argument);
Activation parse_activation(std::string_view name);
Precision parse_precision(std::string_view name);

// A projection's logical shape, with the letters that messages explain it by.
struct Logical {
  int64_t experts, rows, cols;
  const char* row_letters;
  const char* col_letters;
};

// The logical [E, R, C] that a bank's first part stands for; checks only that part's rank and dtype, and the parts'
// number.
Logical logical_shape(TensorList parts, int format, const char* argument, const char* row_letters,
                      const char* col_letters);

// Checks every part of a projection against the format and fills a Weight that reads them in place.
Weight read_weight(TensorList parts, int format, const char* argument, const Logical& shape);

// The shape of part `p`.
std::vector<int64_t> part_shape(const FormatSpec& format, int p, int64_t experts, int64_t rows, int64_t cols);

// Fresh contiguous tensors for a weight of this format.
std::vector<Tensor> allocate_parts(int format, int64_t experts, int64_t rows, int64_t cols);

View2D view2d(const Tensor& t);

}  // namespace cpu_moe::ops
