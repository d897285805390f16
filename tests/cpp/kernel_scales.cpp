// Every scale of a format, and the ends of its range.
#include <algorithm>

#include "kernel_matrix.h"
#include "kernel_tokens.h"

namespace matrix {
namespace {

// Every scale in every block of a group (the f16 ones, which are too many, in some), each seen alone and all together.
void each_scale(const Format& format) {
  std::vector<uint32_t> all = format.scales();
  if (all.empty()) return;
  const int64_t row_block = format.spec().parts[format.spec().part_count > 1 ? 1 : 0].row_block;
  const int64_t blocks = format.scale_block == 128 ? 3 : g_quick ? kWidestGroup + 1 : 2 * kWidestGroup + 1;
  const int64_t cols = format.scale_block == 128 ? 2 * 128 + 44 : blocks * format.scale_block;
  const bool many = all.size() > 256;
  if (many && g_quick) {
    std::vector<uint32_t> some;
    for (size_t i = 0; i < all.size(); i += 61) some.push_back(all[i]);
    for (const uint32_t special : {0x0001u, 0x03FFu, 0x0400u, 0x7BFFu, 0x7C00u, 0x7C01u, 0x8000u, 0xFC00u, 0xFFFFu}) {
      some.push_back(special);
    }
    all = some;
  }
  const auto count = static_cast<int64_t>(all.size());
  const int64_t groups = many ? (count + blocks - 1) / blocks : count;  // of rows with the same scales
  Random random(3);
  Bank bank = banks::random_bank(format, groups * row_block, cols, random);
  std::vector<int32_t> rows;
  for (int64_t g = 0; g < groups; ++g) {
    for (int64_t b = 0; b < blocks; ++b) {
      const int64_t at = many ? std::min(g * blocks + b, count - 1) : (g + b * 7) % count;
      format.set_scale(bank, 1, g * row_block, b, all[static_cast<size_t>(at)]);
    }
    rows.push_back(static_cast<int32_t>(g * row_block + g % row_block));
  }
  const std::vector<int> gains = many || g_quick ? std::vector<int>{0, -60} : std::vector<int>{0, 30, -30, 100, -100};
  std::vector<float> x;
  for (const int gain : gains) {
    for (int64_t b = 0; b < blocks; ++b) {
      for (int64_t c = 0; c < cols; ++c) {
        // One block is few columns.
        x.push_back(c / format.scale_block == b ? cut_to_bf16(scaled(random.normal(), gain)) : 0.0f);
      }
    }
  }
  for (int t = 0; t < 4; ++t) append_token(kKinds[t], cols, random, x);
  check({format, "scales", bank, rows, x});
}

// Scales and activations at the ends of their ranges, two blocks each: nothing may overflow or vanish before the result
// does.
void scale_pairs(const Format& format) {
  if (format.scale_block == 0) return;
  std::vector<uint32_t> list;
  if (format.scale_dtype == DType::kE4M3) list = {0x00, 0x01, 0x08, 0x38, 0x7E, 0xFE};
  if (format.scale_dtype == DType::kU8) list = {0, 1, 22, 24, 100, 127, 200, 253, 254};
  if (format.name == "q4_0") list = {0x0000, 0x0001, 0x03FF, 0x0400, 0x3C00, 0x7BFF, 0xFBFF};
  if (format.scale_block == 128) {
    for (const double scale : {0.0, 1.0, 0x1p126, 1e30, 0x1p-100, 0x1p-126, 0x1p-149})
      list.push_back(banks::bits_of(scale));
  }
  const auto n = static_cast<int64_t>(list.size());
  const int64_t row_block = format.scale_block == 128 ? 128 : 1;
  const int64_t cols = 2 * format.scale_block;
  Random random(4);
  Bank bank = banks::random_bank(format, n * n * row_block, cols, random);
  std::vector<int32_t> rows;
  for (int64_t i = 0; i < n * n; ++i) {
    format.set_scale(bank, 1, i * row_block, 0, list[static_cast<size_t>(i / n)]);
    format.set_scale(bank, 1, i * row_block, 1, list[static_cast<size_t>(i % n)]);
    if (format.spec().part_count == 3) {
      constexpr double kGlobals[] = {1, -1.5, 0x1p120, 0x1p-126, 0x1p-149, 3e38};
      banks::write(bank.at(2, 1, i, 0), static_cast<float>(kGlobals[static_cast<size_t>(i) % std::size(kGlobals)]));
    }
    rows.push_back(static_cast<int32_t>(i * row_block));
  }
  constexpr int kNone = -1000;
  constexpr int kExponents[] = {kNone, -148, -140, -125, -100, -60, -20, 0, 1, 2, 40, 60, 100, 126};
  std::vector<float> x;
  for (const int first : kExponents) {
    for (const int second : kExponents) {
      for (int64_t c = 0; c < cols; ++c) {
        const int exponent = c < format.scale_block ? first : second;
        const double sign = random.below(2) == 0 ? 1 : -1;
        x.push_back(exponent == kNone ? 0.0f : cut_to_bf16(scaled(sign * (1 + random.uniform()), exponent)));
      }
    }
  }
  for (const Precision precision : {Precision::kExact, Precision::kFast}) {
    check({format, "scale pairs", bank, rows, x, precision});
  }
}

// NVFP4's other scale: one for every row.
void global_scales(const Format& format) {
  if (format.spec().part_count != 3) return;
  const std::vector<uint32_t>& list = banks::float_scales();
  const auto rows = static_cast<int64_t>(list.size());
  const int64_t cols = 16 * 19;
  Random random(5);
  Bank bank = banks::random_bank(format, rows, cols, random);
  for (int64_t r = 0; r < rows; ++r) banks::write(bank.at(2, 1, r, 0), list[static_cast<size_t>(r)]);
  check({format, "global scales", bank, first_rows(rows), tokens_of(14, cols, random, true)});
}

}  // namespace

void scales(const Format& format) {
  each_scale(format);
  scale_pairs(format);
  global_scales(format);
}

}  // namespace matrix
