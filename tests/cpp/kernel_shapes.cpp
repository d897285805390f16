// Numbers of columns, rows and tokens; where the parts lie in memory.
#include <utility>

#include "kernel_matrix.h"
#include "kernel_report.h"
#include "kernel_tokens.h"

namespace matrix {

Placement placement_of(int64_t number) {
  Placement p;
  p.side = number % 2 != 0 ? Side::kStart : Side::kEnd;
  p.shift = number % 3 == 0 ? 0 : static_cast<int>(number * 5 % 67);
  p.gap = number % 4 == 0 ? 0 : number * 7 % 130;
  p.layout = static_cast<Placement::Layout>(number % 3);
  return p;
}

// Numbers of columns, rows and tokens, a tail of every length, in changing places.
void shapes(const Format& format) {
  const int64_t block = format.spec().block;
  std::vector<int64_t> widths;
  if (block > 1) {
    for (int64_t b = 1; b <= 2 * kWidestGroup + 1; ++b) widths.push_back(b * block);
  } else {
    for (int64_t c = 1; c <= 260; ++c) {
      if (!g_quick || c <= 34 || c % 32 <= 1) widths.push_back(c);
    }
  }
  for (const int64_t c : {33, 704, 1000, 2880}) widths.push_back((c + block - 1) / block * block);
  int64_t number = 0;
  for (const int64_t cols : widths) {
    ++number;
    Random random(static_cast<uint64_t>(100 + number));
    const int64_t rows = 1 + number % 5, tokens = 1 + number * 7 % 17;
    for (const Precision precision : {Precision::kExact, Precision::kFast}) {
      if (g_quick && (number % 2 == 0) == (precision == Precision::kFast)) continue;
      Problem problem{format,
                      text("shapes %d", static_cast<int>(number)),
                      banks::random_bank(format, rows, cols, random),
                      first_rows(rows),
                      tokens_of(tokens, cols, random),
                      precision};
      problem.placement = placement_of(number);
      problem.alone = !g_quick;
      check(problem);
    }
  }
}

// Every number of rows beside every number of tokens; rows in any order and more than once.
void companies(const Format& format) {
  const int64_t block = format.spec().block;
  for (const int64_t blocks : {3, 11}) {
    const int64_t cols = block == 1 ? blocks * 13 : blocks * block;
    if (g_quick && blocks != 3) continue;
    Random random(static_cast<uint64_t>(6 + blocks));
    const Bank bank = banks::random_bank(format, 140, cols, random);
    for (int64_t rows = 1; rows <= 5; ++rows) {
      for (int64_t tokens = 1; tokens <= 17; ++tokens) {
        if (g_quick && tokens > 5 && tokens % 3 != rows % 3) continue;
        Problem problem{format, "companies", bank, {}, tokens_of(tokens, cols, random)};
        constexpr int32_t kChoices[] = {139, 3, 127, 128, 3, 129, 0, 139};
        for (int64_t r = 0; r < rows; ++r) problem.rows.push_back(kChoices[(r + tokens) % 8]);
        problem.alone = true;
        check(problem);
      }
    }
  }
}

// At every address, before and behind forbidden pages.
void places(const Format& format) {
  const int64_t block = format.spec().block;
  for (const int64_t blocks : {1, 3, 19}) {
    const int64_t cols = block == 1 ? blocks * 7 : blocks * block;
    Random random(static_cast<uint64_t>(8 + blocks));
    const Bank bank = banks::random_bank(format, 2, cols, random);
    const std::vector<float> x = tokens_of(5, cols, random);
    for (const Side side : {Side::kStart, Side::kEnd}) {
      for (int shift = 0; shift < 66; shift += g_quick ? 5 : shift < 17 ? 1 : 3) {
        for (const int64_t tokens : {1, 5}) {
          Problem problem{format, "places", bank, first_rows(2),
                          std::vector<float>(x.begin(), x.begin() + tokens * cols)};
          problem.placement = {side, shift, shift % 3, static_cast<Placement::Layout>(shift % 3)};
          problem.expert = side == Side::kEnd ? 1 : 0;
          check(problem);
        }
      }
    }
  }
}

}  // namespace matrix
