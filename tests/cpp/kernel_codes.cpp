// Every code of a format.
#include "kernel_matrix.h"
#include "kernel_tokens.h"

namespace matrix {
namespace {

// Every code in every position of a group, each seen alone.
void codes_in_every_position(const Format& format, const std::vector<uint32_t>& finite) {
  if (finite.empty() || finite.size() > 256) return;
  const int64_t block = format.spec().block;
  const int64_t cols = block > 1 ? block * (g_quick ? kWidestGroup + 1 : 2 * kWidestGroup + 1) : (g_quick ? 130 : 300);
  const auto rows = static_cast<int64_t>(finite.size());
  Bank bank = banks::empty_bank(format, rows, cols);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) format.set_code(bank, 1, r, c, finite[static_cast<size_t>((r + c) % rows)]);
  }
  std::vector<int64_t> columns;
  for (int64_t c = 0; c < cols; ++c) columns.push_back(c);
  check({format, "codes", bank, first_rows(rows), one_hot(columns, cols)});
  Random random(1);
  check({format, "codes, all at once", bank, first_rows(rows), tokens_of(4, cols, random)});
}

// Every code of a format that has too many for every position.
void codes_once(const Format& format, const std::vector<uint32_t>& finite) {
  if (finite.size() <= 256) return;
  const int64_t cols = 256, rows = 256;
  Bank bank = banks::empty_bank(format, rows, cols);
  for (int64_t i = 0; i < rows * cols; ++i) {
    const size_t code = std::min(static_cast<size_t>(i), finite.size() - 1);
    format.set_code(bank, 1, i / cols, i % cols, finite[code]);
  }
  std::vector<int64_t> columns;
  for (int64_t c = 0; c < cols; c += g_quick ? 15 : 1) columns.push_back(c);
  check({format, "codes", bank, first_rows(rows), one_hot(columns, cols)});
}

// Codes that are no finite number, in every column; the rows between are not touched by them.
void special_codes(const Format& format, const std::vector<uint32_t>& special) {
  if (special.empty()) return;
  const int64_t cols = g_quick ? 70 : 261;
  Random random(2);
  Bank bank = banks::random_bank(format, 2 * cols, cols, random);
  for (int64_t c = 0; c < cols; ++c) {
    const auto choice = static_cast<size_t>((c + c / static_cast<int64_t>(special.size()))) % special.size();
    format.set_code(bank, 1, 2 * c, c, special[choice]);
  }
  std::vector<float> x = tokens_of(2, cols, random);
  append_token(Kind::kZero, cols, random, x);
  append_token(Kind::kInfinity, cols, random, x);
  check({format, "special codes", bank, first_rows(2 * cols), x});
}

}  // namespace

void codes(const Format& format) {
  const auto [finite, special] = banks::sort_codes(format);
  codes_in_every_position(format, finite);
  codes_once(format, finite);
  special_codes(format, special);
}

}  // namespace matrix
