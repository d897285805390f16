// Operators without tensors (or with one that is only read): threads, tiers, introspection, the bandwidth ceiling.
#include "../formats/format.h"
#include "../simd/tier.h"
#include "../system/info.h"
#include "../system/pool.h"
#include "checks.h"
#include "ops.h"
#include "parallel_for.h"

#include <atomic>

namespace cpu_moe::ops {
namespace {

std::string quoted(std::string_view text) { return "\"" + std::string(text) + "\""; }

}  // namespace

int64_t stream_read(const Tensor& data, int64_t variant) {
  check_cpu(data, "data");
  TORCH_CHECK_VALUE(data.is_contiguous(), "data: expected a contiguous tensor, got strides ",
                    shape_text(data.strides()));
  TORCH_CHECK_VALUE(variant >= 0 && variant < kStreamReadVariants, "variant: expected 0 to ", kStreamReadVariants - 1,
                    ", got ", variant);
  const TierKernels& tier = active_kernels();
  const uint8_t* bytes = static_cast<const uint8_t*>(data.const_data_ptr());
  const int64_t size = data.numel() * data.element_size();
  // Pieces as large as keep all threads busy to the end: a plain read should lose nothing to scheduling.
  constexpr int64_t kPiece = int64_t{1} << 20;
  std::atomic<uint64_t> total{0};
  parallel_for((size + kPiece - 1) / kPiece, [&](int64_t item) {
    const uint8_t* piece = bytes + item * kPiece;
    const int64_t length = std::min(kPiece, size - item * kPiece);
    total.fetch_add(tier.stream_read(piece, length, static_cast<int>(variant)), std::memory_order_relaxed);
  });
  return static_cast<int64_t>(total.load() & 0x7FFFFFFFFFFFFFFF);
}

int64_t stream_read_variants() { return kStreamReadVariants; }

void set_num_threads(int64_t n) {
  constexpr int64_t kMost = 4096;
  TORCH_CHECK_VALUE(n >= 1 && n <= kMost, "n: expected a number of threads from 1 to ", kMost, ", got ", n);
  sys::set_thread_count(static_cast<int>(n));
}

int64_t get_num_threads() {
  return as_value_error([] { return sys::thread_count(); });
}

std::string tiers() {
  return as_value_error([] {
    const std::string active(active_tier().name);
    std::string compiled, supported;
    for (const Tier& tier : compiled_tiers()) {
      compiled += (compiled.empty() ? "" : ", ") + quoted(tier.name);
      if (tier.supported()) supported += (supported.empty() ? "" : ", ") + quoted(tier.name);
    }
    const std::string requested = requested_tier();
    return "{\"compiled\": [" + compiled + "], \"supported\": [" + supported + "], \"active\": " + quoted(active) +
           ", \"requested\": " + (requested.empty() ? "null" : quoted(requested)) + "}";
  });
}

void set_tier(std::string_view name) {
  as_value_error([&] {
    cpu_moe::set_tier(name);
    return 0;
  });
}

std::string formats() {
  std::string text = "[";
  for (const FormatSpec& f : registry()) {
    text += text.size() > 1 ? ", " : "";
    text += "{\"name\": " + quoted(f.name) + ", \"block\": " + std::to_string(f.block) + ", \"parts\": [";
    for (int p = 0; p < f.part_count; ++p) {
      const PartSpec& part = f.parts[p];
      std::string dtypes = quoted(dtype_name(part.dtypes[0]));
      if (part.dtypes[1] != part.dtypes[0]) dtypes += ", " + quoted(dtype_name(part.dtypes[1]));
      std::string shape =
          std::string("E, ") + (part.row_block == 1 ? "R" : "ceil(R/" + std::to_string(part.row_block) + ")");
      if (part.col_block != 0) {
        const bool exact = f.block % part.col_block == 0;
        const std::string cols = part.col_block == 1 ? "C"
                                 : exact             ? "C/" + std::to_string(part.col_block)
                                                     : "ceil(C/" + std::to_string(part.col_block) + ")";
        shape += ", " + cols + (part.col_units == 1 ? "" : "*" + std::to_string(part.col_units));
      }
      text += std::string(p ? ", " : "") + "{\"name\": " + quoted(part.name) + ", \"dtypes\": [" + dtypes +
              "], \"shape\": " + quoted(shape) + "}";
    }
    text += "]}";
  }
  return text + "]";
}

std::string system_info() {
  return as_value_error([] { return sys::system_info_json(); });
}

}  // namespace cpu_moe::ops
