#include "checks.h"

#include <ATen/ops/empty.h>

namespace cpu_moe::ops {
namespace {

constexpr struct {
  DType dtype;
  ScalarType scalar_type;
  const char* name;
} kDTypes[] = {
    {DType::kF32, ScalarType::Float, "float32"},
    {DType::kF16, ScalarType::Half, "float16"},
    {DType::kBF16, ScalarType::BFloat16, "bfloat16"},
    {DType::kF64, ScalarType::Double, "float64"},
    {DType::kE4M3, ScalarType::Float8_e4m3fn, "float8_e4m3fn"},
    {DType::kU8, ScalarType::Byte, "uint8"},
    {DType::kI32, ScalarType::Int, "int32"},
    {DType::kI64, ScalarType::Long, "int64"},
};

struct NamedActivation {
  const char* name;
  Activation activation;
};
constexpr NamedActivation kActivations[] = {
    {"silu", Activation::kSilu},   {"gelu", Activation::kGelu},           {"gelu_tanh", Activation::kGeluTanh},
    {"relu2", Activation::kRelu2}, {"swigluoai", Activation::kSwigluOai}, {"swiglu_clamp", Activation::kSwigluClamp},
};

std::string part_label(const char* argument, int p) { return std::string(argument) + "[" + std::to_string(p) + "]"; }

std::string expected_dtypes(const PartSpec& part) {
  std::string text = dtype_name(part.dtypes[0]);
  if (part.dtypes[1] != part.dtypes[0]) text += " or " + dtype_name(part.dtypes[1]);
  return text;
}

std::string divided(const std::string& letters, int by, bool exact) {
  if (by == 1) return letters;
  return exact ? letters + "/" + std::to_string(by) : "ceil(" + letters + "/" + std::to_string(by) + ")";
}

// "(E, H, I/32*18)"
std::string shape_letters(const FormatSpec& format, const PartSpec& part, const Logical& shape) {
  std::string text = "(E, " + divided(shape.row_letters, part.row_block, false);
  if (part.col_block != 0) {
    text += ", " + divided(shape.col_letters, part.col_block, format.block % part.col_block == 0);
    if (part.col_units != 1) text += "*" + std::to_string(part.col_units);
  }
  return text + ")";
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

void check_part_dtype(const Tensor& t, const PartSpec& part, const std::string& label) {
  for (const DType accepted : part.dtypes) {
    if (t.scalar_type() == scalar_type_of(accepted)) return;
  }
  TORCH_CHECK_TYPE(false, label, ": expected ", part.name, " of dtype ", expected_dtypes(part), ", got ",
                   dtype_name(t.scalar_type()));
}

}  // namespace

DType dtype_of(ScalarType type, const std::string& name) {
  for (const auto& row : kDTypes) {
    if (row.scalar_type == type) return row.dtype;
  }
  TORCH_CHECK_TYPE(false, name, ": unsupported dtype ", dtype_name(type));
}

ScalarType scalar_type_of(DType type) { return kDTypes[static_cast<int>(type)].scalar_type; }
std::string dtype_name(DType type) { return kDTypes[static_cast<int>(type)].name; }

std::string dtype_name(ScalarType type) { return std::string(c10::getDtypeNames(type).first); }

void check_cpu(const Tensor& t, const std::string& name) {
  TORCH_CHECK(t.device().is_cpu(), name, ": expected a tensor on the CPU, got one on ", t.device());
  TORCH_CHECK(t.layout() == at::kStrided, name, ": expected a dense (strided) tensor, got layout ", t.layout());
}

void check_no_grad(const Tensor& t, const std::string& name) {
  TORCH_CHECK(!(at::GradMode::is_enabled() && t.requires_grad()), name,
              ": requires grad, but cpu_moe operators have no backward; expected a call under torch.no_grad() or "
              "torch.inference_mode(), or a detached tensor");
}

int parse_format(std::string_view name, const char* argument) {
  const int format = find_format(name);
  if (format < 0) {
    std::string valid;
    for (const FormatSpec& f : registry()) valid += (valid.empty() ? "" : ", ") + std::string(f.name);
    TORCH_CHECK_VALUE(false, argument, ": unknown weight format '", name, "'; expected one of ", valid);
  }
  return format;
}

Activation parse_activation(std::string_view name) {
  std::string valid;
  for (const auto& row : kActivations) {
    if (name == row.name) return row.activation;
    valid += (valid.empty() ? "" : ", ") + std::string(row.name);
  }
  TORCH_CHECK_VALUE(false, "activation: unknown activation '", name, "'; expected one of ", valid);
}

Precision parse_precision(std::string_view name) {
  if (name == "exact") return Precision::kExact;
  if (name == "fast") return Precision::kFast;
  TORCH_CHECK_VALUE(false, "precision: unknown precision '", name, "'; expected one of exact, fast");
}

std::vector<int64_t> part_shape(const FormatSpec& format, int p, int64_t experts, int64_t rows, int64_t cols) {
  const PartSpec& part = format.parts[p];
  std::vector<int64_t> shape = {experts, ceil_div(rows, part.row_block)};
  if (part.col_block != 0) shape.push_back(ceil_div(cols, part.col_block) * part.col_units);
  return shape;
}

Logical logical_shape(TensorList parts, int format, const char* argument, const char* row_letters,
                      const char* col_letters) {
  const FormatSpec& spec = registry()[static_cast<size_t>(format)];
  std::string names;
  for (int p = 0; p < spec.part_count; ++p) names += (p ? ", " : "") + std::string(spec.parts[p].name);
  TORCH_CHECK_VALUE(static_cast<int>(parts.size()) == spec.part_count, argument, ": format ", spec.name, " takes ",
                    spec.part_count, " tensor(s) (", names, "), got ", parts.size());
  for (int p = 0; p < spec.part_count; ++p) {
    const std::string label = part_label(argument, p);
    check_cpu(parts[static_cast<size_t>(p)], label);
    check_part_dtype(parts[static_cast<size_t>(p)], spec.parts[p], label);
    check_no_grad(parts[static_cast<size_t>(p)], label);
  }
  const Tensor& first = parts[0];
  const PartSpec& part = spec.parts[0];
  TORCH_CHECK_VALUE(first.dim() == 3, part_label(argument, 0), ": expected ", part.name, " with 3 dimensions (E, ",
                    row_letters, ", ", divided(col_letters, part.col_block, true),
                    part.col_units != 1 ? "*" + std::to_string(part.col_units) : "", "), got shape ",
                    shape_text(first.sizes()));
  TORCH_CHECK_VALUE(first.size(2) % part.col_units == 0, part_label(argument, 0), ": expected the last dimension of ",
                    part.name, " to be a multiple of ", part.col_units, ", got shape ", shape_text(first.sizes()));
  return {first.size(0), first.size(1), first.size(2) / part.col_units * part.col_block, row_letters, col_letters};
}

Weight read_weight(TensorList parts, int format, const char* argument, const Logical& shape) {
  const FormatSpec& spec = registry()[static_cast<size_t>(format)];
  TORCH_CHECK_VALUE(shape.cols % spec.block == 0, argument, ": format ", spec.name, " needs columns (",
                    shape.col_letters, ") in blocks of ", spec.block, ", got ", shape.col_letters, " = ", shape.cols);
  Weight w;
  w.format = format;
  w.rows = shape.rows;
  w.cols = shape.cols;
  for (int p = 0; p < spec.part_count; ++p) {
    const Tensor& t = parts[static_cast<size_t>(p)];
    const PartSpec& part = spec.parts[p];
    const std::string label = part_label(argument, p);
    const std::vector<int64_t> expected = part_shape(spec, p, shape.experts, shape.rows, shape.cols);
    TORCH_CHECK_VALUE(t.sizes() == IntArrayRef(expected), label, ": expected ", part.name, " of shape ",
                      shape_text(expected), " ", shape_letters(spec, part, shape), ", got ", shape_text(t.sizes()));
    if (!part.any_strides) {
      int64_t contiguous = 1;
      for (int64_t d = t.dim() - 1; d >= 1; --d) {
        TORCH_CHECK_VALUE(t.size(d) == 1 || t.stride(d) == contiguous, label, ": expected ", part.name,
                          " contiguous within each expert (strides [any, ...] ending in ", contiguous, " at dimension ",
                          d, "), got strides ", shape_text(t.strides()),
                          "; call .contiguous() on it once, when loading");
        contiguous *= t.size(d);
      }
    }
    const int64_t size = t.element_size();
    w.part[p] = static_cast<const uint8_t*>(t.const_data_ptr());
    w.dtype[p] = dtype_of(t.scalar_type(), label);
    w.expert_stride[p] = t.stride(0) * size;
    // A dimension of one entry may claim any stride.
    w.row_stride[p] = (part.any_strides || t.size(1) > 1 ? t.stride(1) : (t.dim() > 2 ? t.size(2) : 1)) * size;
    w.col_stride[p] = t.dim() > 2 ? (part.any_strides ? t.stride(2) : 1) * size : 0;
  }
  return w;
}

std::vector<Tensor> allocate_parts(int format, int64_t experts, int64_t rows, int64_t cols) {
  const FormatSpec& spec = registry()[static_cast<size_t>(format)];
  std::vector<Tensor> parts;
  for (int p = 0; p < spec.part_count; ++p) {
    parts.push_back(at::empty(part_shape(spec, p, experts, rows, cols),
                              at::TensorOptions().dtype(scalar_type_of(spec.parts[p].dtypes[0])).device(at::kCPU)));
  }
  return parts;
}

View2D view2d(const Tensor& t) {
  const int64_t size = t.element_size();
  return {static_cast<const uint8_t*>(t.const_data_ptr()),
          dtype_of(t.scalar_type(), "tensor"),
          {t.stride(0) * size, t.stride(1) * size}};
}

}  // namespace cpu_moe::ops
