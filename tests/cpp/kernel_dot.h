// One call of a format's dot(), on every tier, against kernel_reference.h and against the scalar tier.
#pragma once

#include <string>
#include <vector>

#include "../../csrc/simd/tier.h"
#include "kernel_banks.h"

namespace matrix {

using banks::Bank;
using banks::Format;
using banks::Placement;
using banks::Random;
using cpu_moe::DType;
using cpu_moe::Precision;
using guarded::Side;

struct RunningTier {
  std::string name;
  cpu_moe::TierKernels kernels;
};

// What is tested. The scalar one first, for it is what the others are compared with.
extern std::vector<RunningTier> g_tiers;

// The supported tiers, or of these `only` beside the scalar one; says which do not run here. False without such a tier.
bool choose_tiers(std::string_view only);

// One call of dot() with everything about it.
struct Problem {
  const Format& format;
  std::string what;
  Bank bank;
  std::vector<int32_t> rows;  // in the order of the call
  std::vector<float> x;       // [tokens][columns]
  Precision precision = Precision::kExact;
  Placement placement = {};
  // Calls again with each token and each row by itself: what shares a call must not change a bit.
  bool alone = false;
  int64_t expert = 1;  // the last: behind its last row lies the forbidden page
  // Few weights may decide: the rounding of activations is then judged by the most that it can be, not by what it comes
  // to over many of them.
  bool worst_rounding = false;
  // A known limit: where a result leaves float32's range, a token of two planes may have infinities of both signs, and
  // their sum.
  bool allow_lost_infinities = false;

  int64_t tokens() const { return static_cast<int64_t>(x.size()) / bank.cols; }
  int64_t row_count() const { return static_cast<int64_t>(rows.size()); }
};

std::vector<int32_t> first_rows(int64_t n);

// A NaN's sign and payload are nobody's promise.
bool same_bits(float a, float b);

void check(const Problem& problem);

}  // namespace matrix
