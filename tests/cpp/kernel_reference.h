// What the kernels must compute, in double, from the formats' specifications: nothing of csrc's arithmetic is used.
// The bounds are those of tests/reference.py, whose header derives them.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace reference {

constexpr double kHalfUlp = 0x1p-24;  // of float32, relative
// |x - int16(x)| in units of its block's largest magnitude. Scales that are powers of two may round twice as coarsely,
// so this holds where many weights decide; cases of few columns use activations that are held exactly (no step at all).
constexpr double kInt16Step = 1.01 / 65534;
constexpr double kTwoPlanesStep = 1.01 * 0x1p-30;  // with the second plane (int16_planes.h)
// The most that they can be, where few weights may decide. (The second plane's integers are cut off, not rounded.)
constexpr double kInt16WorstStep = 1.01 / 32768;
constexpr double kTwoPlanesWorstStep = 1.01 * 0x1p-29;
constexpr double kInt8Step = 1.0 / 254;  // what `fast` may do
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// ------------------------------------------------------------------------------------------------- decoding of numbers

// What the topmost exponent means: IEEE's infinities and NaNs, one NaN a sign (E4M3), or ordinary numbers (E2M1).
enum class Top { kIeee, kOneNaN, kNumbers };

// The value of a code of 1 sign bit, `exponent_bits` and `mantissa_bits`.
inline double number(uint32_t code, int exponent_bits, int mantissa_bits, Top top) {
  const int exponent = static_cast<int>(code >> mantissa_bits & ((1u << exponent_bits) - 1));
  const uint32_t mantissa = code & ((1u << mantissa_bits) - 1);
  const bool negative = (code >> (exponent_bits + mantissa_bits) & 1) != 0;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  double magnitude;
  if (top == Top::kIeee && exponent == (1 << exponent_bits) - 1) {
    magnitude = mantissa == 0 ? kInfinity : kNaN;
  } else if (top == Top::kOneNaN && exponent == (1 << exponent_bits) - 1 && mantissa == (1u << mantissa_bits) - 1) {
    magnitude = kNaN;
  } else if (exponent == 0) {
    magnitude = std::ldexp(mantissa, 1 - bias - mantissa_bits);
  } else {
    magnitude = std::ldexp(mantissa + (1u << mantissa_bits), exponent - bias - mantissa_bits);
  }
  return negative ? -magnitude : magnitude;
}

// OCP MX v1.0 5.3.3, OCP OFP8 v1.0, IEEE 754 binary16, bfloat16, OCP MX v1.0 5.4.1.
inline double e2m1(uint32_t code) { return number(code, 2, 1, Top::kNumbers); }
inline double e4m3(uint32_t code) { return number(code, 4, 3, Top::kOneNaN); }
inline double f16(uint32_t code) { return number(code, 5, 10, Top::kIeee); }
inline double bf16(uint32_t code) { return number(code, 8, 7, Top::kIeee); }
inline double e8m0(uint32_t code) { return code == 255 ? kNaN : std::ldexp(1.0, static_cast<int>(code) - 127); }

// The nearest number with `mantissa_bits` bits behind the leading one and no smaller exponent than `least`, ties to
// even; no bound above.
inline double round_to(double x, int mantissa_bits, int least) {
  if (x == 0 || !std::isfinite(x)) return x;
  const double step = std::ldexp(1.0, std::max(std::ilogb(x), least) - mantissa_bits);
  return std::copysign(std::nearbyint(x / step) * step, x);
}
inline double round_e4m3(double x) { return std::clamp(round_to(std::clamp(x, -448.0, 448.0), 3, -6), -448.0, 448.0); }
inline double round_f16(double x) {
  const double y = round_to(x, 10, -14);
  return std::fabs(y) > 65504 ? std::copysign(kInfinity, x) : y;
}
inline double round_bf16(double x) {
  const double y = round_to(x, 7, -126);
  return std::fabs(y) > std::ldexp(255.0, 120) ? std::copysign(kInfinity, x) : y;
}

// ----------------------------------------------------------------------------------------------- rules for activations

inline float largest(const float* x, int64_t n) {
  float amax = 0;
  for (int64_t i = 0; i < n; ++i) amax = std::max(amax, std::fabs(x[i]));
  return amax;
}

// DeepSeek's act_quant: per 128 values s = 2^ceil(log2(max(amax, 1e-4) / 448)), E4M3 of x / s, times s.
inline void round_as_ds_fp4(const float* x, int64_t n, double* out) {
  for (int64_t first = 0; first < n; first += 128) {
    const int64_t end = std::min(n, first + 128);
    const float ratio = std::max(largest(x + first, end - first), 1e-4f) * (1.0f / 448.0f);
    int exponent;
    if (std::frexp(ratio, &exponent) == 0.5f) --exponent;  // a power of two
    for (int64_t i = first; i < end; ++i) out[i] = std::ldexp(round_e4m3(std::ldexp(x[i], -exponent)), exponent);
  }
}

// ggml's Q8_0: per 32 values d = amax / 127, q = round(x / d) with halves away from zero; d is kept as f16, or as it is
// beyond f16's range. In float32 step by step, as the rule is.
inline void round_as_q8_0(const float* x, int64_t n, double* out) {
  for (int64_t first = 0; first < n; first += 32) {
    const float d = largest(x + first, 32) / 127.0f;
    const float inverse = d > 0 ? 1.0f / d : 0.0f;
    const double kept = d > 65504.0f ? d : round_f16(d);
    for (int64_t i = first; i < first + 32; ++i) {
      const float q = std::isfinite(inverse) ? x[i] * inverse : x[i] / d;
      out[i] = std::round(static_cast<double>(q)) * kept;
    }
  }
}

// ----------------------------------------------------------------------------------------------------------------- dot

// How a format's kernel may hold activations.
struct Activations {
  enum Rule { kNone, kDsFp4, kQ8_0 } rule = kNone;
  int block = 0;    // of int16 or int8 integers; 0: float32
  double step = 0;  // error of an integer, in units of its block's largest magnitude
  double fine_step = kTwoPlanesStep;
};

// A token as it enters the products.
struct Token {
  const float* raw;
  std::vector<double> x;          // after the rule
  std::vector<int64_t> nonzero;   // where it is not 0
  std::vector<double> step;       // of each block: what rounding may do to an element
  std::vector<double> fine_step;  // the same where the token has two planes
  bool needs_two = false;         // an outlier hides its neighbours: one plane would not do
  bool nan = false, infinite = false;

  Token(const float* values, int64_t cols, const Activations& how) : raw(values), x(values, values + cols) {
    for (int64_t c = 0; c < cols; ++c) {
      nan |= std::isnan(values[c]);
      infinite |= std::isinf(values[c]);
    }
    if (nan || infinite) return;
    if (how.rule == Activations::kDsFp4) round_as_ds_fp4(values, cols, x.data());
    if (how.rule == Activations::kQ8_0) round_as_q8_0(values, cols, x.data());
    for (int64_t c = 0; c < cols; ++c) {
      if (x[static_cast<size_t>(c)] != 0) nonzero.push_back(c);
    }
    if (how.block == 0) return;
    for (int64_t first = 0; first < cols; first += how.block) {
      const double* values_of_block = &x[static_cast<size_t>(first)];
      const int64_t n = std::min<int64_t>(how.block, cols - first);
      double amax = 0;
      for (int64_t i = 0; i < n; ++i) amax = std::max(amax, std::fabs(values_of_block[i]));
      int used = 0, hidden = 0, inexact = 0;
      if (amax > 0) {
        // An int16 holds multiples of 2^(e - 14); where all are, nothing is rounded.
        const int places = 14 - std::ilogb(amax);
        for (int64_t i = 0; i < n; ++i) {
          const double scaled = std::ldexp(values_of_block[i], places);
          const bool rounded = scaled != std::nearbyint(scaled);
          used += scaled != 0;
          inexact += rounded;
          hidden += rounded && std::fabs(values_of_block[i]) < amax * 0x1p-11;
        }
      }
      const bool exact = inexact == 0 && how.step < kInt8Step;
      step.push_back(exact ? 0 : how.step * amax);
      fine_step.push_back(exact ? 0 : how.fine_step * amax);
      needs_two |= how.step < kInt8Step && hidden > 0 && hidden * 4 >= used;
    }
  }
};

// A row's weights.
struct Row {
  std::vector<double> w;
  std::vector<double> block_size;  // sum of magnitudes per block of the activations
  bool nan = false, infinite = false;

  Row(std::vector<double> weights, const Activations& how) : w(std::move(weights)) {
    for (const double v : w) {
      nan |= std::isnan(v);
      infinite |= std::isinf(v);
    }
    if (how.block == 0 || nan || infinite) return;
    const auto block = static_cast<size_t>(how.block);
    for (size_t first = 0; first < w.size(); first += block) {
      double size = 0;
      for (size_t i = first; i < std::min(first + block, w.size()); ++i) size += std::fabs(w[i]);
      block_size.push_back(size);
    }
  }
};

struct Expected {
  // kBeyond: float32's range does not suffice on the way, or not surely: the value if it is finite.
  enum Kind { kWithin, kNaN, kInfinite, kNotFinite, kBeyond } kind = kWithin;
  double value = 0;
  double bound = 0;       // around the value, the rounding of activations included
  double fine_bound = 0;  // the same with two planes
  double arithmetic = 0;  // what float32 products and sums alone may do
};

// `strict`: infinite weights are summed one by one, as IEEE arithmetic would (elsewhere integers are summed first, and
// an infinite scale makes the result infinite or NaN).
inline Expected dot(const Row& row, const Token& token, bool strict) {
  Expected out;
  const int64_t n = static_cast<int64_t>(row.w.size());
  // Infinite scales make NaNs of zero codes, but integers are summed first: "not finite" is all that is promised.
  if (token.nan || (row.nan && (strict || !row.infinite))) {
    out.kind = Expected::kNaN;
    return out;
  }
  if (token.infinite || row.infinite) {
    double sum = 0, finite = 0;
    for (int64_t c = 0; c < n; ++c) {
      const double product = row.w[static_cast<size_t>(c)] * static_cast<double>(token.raw[static_cast<size_t>(c)]);
      sum += product;
      if (std::isfinite(product)) finite += std::fabs(product);
    }
    out.value = sum;
    // Finite products may overflow in float32, and take the infinity's sign or make it NaN.
    const bool overflows = finite >= static_cast<double>(FLT_MAX) / 4;
    out.kind = overflows || (row.infinite && !token.infinite && !strict) ? Expected::kNotFinite
               : std::isnan(sum)                                         ? Expected::kNaN
                                                                         : Expected::kInfinite;
    return out;
  }
  double size = 0, rounding = 0, fine_rounding = 0;
  bool positive = false, negative = false;
  for (const int64_t c : token.nonzero) {
    const double product = row.w[static_cast<size_t>(c)] * token.x[static_cast<size_t>(c)];
    out.value += product;
    size += std::fabs(product);
    positive |= product > 0;
    negative |= product < 0;
  }
  for (size_t b = 0; b < row.block_size.size(); ++b) {
    rounding += row.block_size[b] * token.step[b];
    fine_rounding += row.block_size[b] * token.fine_step[b];
  }
  const double count = static_cast<double>(n);
  out.arithmetic = (count / 8 + 16) * kHalfUlp * size + count * 0x1p-149 + 0x1p-22 * std::fabs(out.value) + 0x1p-148;
  out.fine_bound = out.arithmetic + fine_rounding;
  out.bound = token.needs_two ? out.fine_bound : out.arithmetic + rounding;
  if (size + out.bound >= static_cast<double>(FLT_MAX) / 4) {
    const bool surely = positive != negative && std::fabs(out.value) - out.bound > static_cast<double>(FLT_MAX);
    out.kind = surely ? Expected::kInfinite : Expected::kBeyond;
  }
  return out;
}

inline bool fits(const Expected& want, double got, bool two_planes) {
  const bool within = std::fabs(got - want.value) <= (two_planes ? want.fine_bound : want.bound);
  switch (want.kind) {
    case Expected::kWithin:
      return within;
    case Expected::kNaN:
      return std::isnan(got);
    case Expected::kInfinite:
      return std::isinf(got) && std::signbit(got) == std::signbit(want.value);
    case Expected::kNotFinite:
      return !std::isfinite(got);
    case Expected::kBeyond:
      return !std::isfinite(got) || within;
  }
  return false;
}

}  // namespace reference
