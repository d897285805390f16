// The table of weight formats. Sources: DESIGN of each format is in its header, formats/NAME.h.
#include "format.h"

namespace cpu_moe {
namespace {

constexpr FormatSpec kRegistry[] = {
    {"bf16", 1, 1, {{"weight", {DType::kBF16, DType::kBF16}}}},
    {"f16", 1, 1, {{"weight", {DType::kF16, DType::kF16}}}},
    {"f32", 1, 1, {{"weight", {DType::kF32, DType::kF32}}}},
    {"mxfp4", 32, 2, {{"packed", {DType::kU8, DType::kU8}, 1, 2}, {"scale", {DType::kU8, DType::kU8}, 1, 32}}},
    {"nvfp4",
     16,
     3,
     {{"packed", {DType::kU8, DType::kU8}, 1, 2},
      {"scale", {DType::kE4M3, DType::kE4M3}, 1, 16},
      {"global", {DType::kF32, DType::kF32}, 1, 0}}},
    {"ds_fp4", 32, 2, {{"packed", {DType::kU8, DType::kU8}, 1, 2}, {"scale", {DType::kU8, DType::kU8}, 1, 32}}},
    {"fp8_block",
     1,
     2,
     {{"weight", {DType::kE4M3, DType::kE4M3}}, {"scale", {DType::kF32, DType::kBF16}, 128, 128, 1, true}}},
    {"q4_0", 32, 1, {{"blocks", {DType::kU8, DType::kU8}, 1, 32, 18}}},
};

}  // namespace

std::span<const FormatSpec> registry() { return kRegistry; }

int find_format(std::string_view name) {
  for (size_t i = 0; i < std::size(kRegistry); ++i) {
    if (kRegistry[i].name == name) return static_cast<int>(i);
  }
  return -1;
}

}  // namespace cpu_moe
