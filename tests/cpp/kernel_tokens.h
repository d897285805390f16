// Activations for the kernels' tests.
#pragma once

#include <cstdint>
#include <vector>

#include "kernel_banks.h"

namespace matrix {

enum class Kind {
  kNormal,
  kBf16,
  kOutlier,
  kOutliers,
  kSpread,
  kEdge,
  kTiny,
  kSubnormal,
  kHuge,
  kLargest,
  kZero,
  kNegativeZero,
  kSparse,
  kOneHot,
  kNaN,
  kInfinity,
  kNegativeInfinity,
  kMixed,
};
constexpr Kind kKinds[] = {
    Kind::kNormal,
    Kind::kBf16,
    Kind::kOutlier,
    Kind::kOutliers,
    Kind::kSpread,
    Kind::kEdge,
    Kind::kTiny,
    Kind::kSubnormal,
    Kind::kHuge,
    Kind::kLargest,
    Kind::kZero,
    Kind::kNegativeZero,
    Kind::kSparse,
    Kind::kOneHot,
    Kind::kNaN,
    Kind::kInfinity,
    Kind::kNegativeInfinity,
    Kind::kMixed,
};

float cut_to_bf16(float x);
float scaled(double x, int exponent);

void append_token(Kind kind, int64_t cols, banks::Random& random, std::vector<float>& x);

// Ordinary ones, every third with an outlier, or of all kinds.
std::vector<float> tokens_of(int64_t count, int64_t cols, banks::Random& random, bool all_kinds = false);

// A token for each of `columns`: 1 there, else 0.
std::vector<float> one_hot(const std::vector<int64_t>& columns, int64_t cols);

}  // namespace matrix
