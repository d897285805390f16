// Activations of every kind.
#include "kernel_matrix.h"
#include "kernel_tokens.h"

namespace matrix {

// Activations of every kind side by side: none may notice the others.
void activations(const Format& format) {
  const int64_t block = format.spec().block;
  std::vector<int64_t> widths = {block, 160, 1056};
  if (!g_quick) widths.insert(widths.end(), {1, 5, 320, 2880});
  for (const int64_t width : widths) {
    const int64_t cols = (width + block - 1) / block * block;
    for (int wild = 0; wild < 2; ++wild) {
      Random random(static_cast<uint64_t>(7 + width));
      Bank bank = banks::random_bank(format, 5, cols, random);
      if (wild != 0) {  // weights of every magnitude
        if (format.scale_block != 0) continue;
        for (int64_t i = 0; i < 5 * cols; ++i) {
          auto code = static_cast<uint32_t>(random.bits());
          const uint32_t top = bank.dtype[0] == DType::kF32   ? 0x7F800000
                               : bank.dtype[0] == DType::kF16 ? 0x7C00
                                                              : 0x7F80;
          if ((code & top) == top) code &= ~(top & (top >> 1));  // finite
          format.set_code(bank, 1, i / cols, i % cols, code);
        }
      }
      for (const Precision precision : {Precision::kExact, Precision::kFast}) {
        for (int64_t order = 0; order < (g_quick ? 1 : 3); ++order) {
          std::vector<float> x;
          for (size_t t = 0; t < std::size(kKinds); ++t) {
            append_token(kKinds[(t * (order == 1 ? 5 : order == 2 ? 7 : 1)) % std::size(kKinds)], cols, random, x);
          }
          Problem problem{format,   wild != 0 ? "activations, wild weights" : "activations", bank, first_rows(5), x,
                          precision};
          problem.placement = placement_of(width + order);
          problem.alone = true;
          check(problem);
        }
      }
    }
  }
}

}  // namespace matrix
