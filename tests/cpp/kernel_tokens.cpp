#include "kernel_tokens.h"

namespace matrix {

using banks::Random;

float cut_to_bf16(float x) { return std::bit_cast<float>(std::bit_cast<uint32_t>(x) & 0xFFFF0000u); }
float scaled(double x, int exponent) { return static_cast<float>(std::ldexp(x, exponent)); }

void append_token(Kind kind, int64_t cols, Random& random, std::vector<float>& x) {
  const size_t first = x.size();
  const bool narrow = cols < 64;  // see reference::kInt16Step
  int exponent = 0;
  for (int64_t c = 0; c < cols; ++c) {
    const double normal = random.normal();
    if (c % 16 == 0) exponent = static_cast<int>(random.below(60)) - 30;
    float value = static_cast<float>(normal);
    switch (kind) {
      case Kind::kBf16:
        value = cut_to_bf16(value);
        break;
      case Kind::kSpread:
        value = scaled(normal, exponent);
        break;
      // Right below a power of two: where rounding to an integer takes the next exponent.
      case Kind::kEdge:
        value = scaled(2 - std::ldexp(random.uniform(), -14), exponent);
        break;
      case Kind::kTiny:
        value = scaled(normal, -120);
        break;
      case Kind::kSubnormal:
        value = scaled(normal, -140);
        break;
      case Kind::kHuge:
        value = scaled(normal, 100);
        break;
      case Kind::kLargest:
        value = scaled(std::copysign(1 + random.uniform() * 0.99, normal), 127);
        break;
      case Kind::kZero:
      case Kind::kOneHot:
        value = 0.0f;
        break;
      case Kind::kNegativeZero:
        value = -0.0f;
        break;
      case Kind::kSparse:
        value = c / 16 % 3 == 1 ? value : 0.0f;
        break;
      default:
        break;
    }
    x.push_back(narrow ? cut_to_bf16(value) : value);
  }
  const auto at = [&](int64_t c) -> float& { return x[first + static_cast<size_t>(c)]; };
  const int64_t place = random.below(cols);
  switch (kind) {
    case Kind::kOutlier:
      at(place) = 3e4f;
      break;
    case Kind::kOutliers:
      for (int64_t c = 0; c < cols; c += 1 + random.below(40)) at(c) = scaled(random.normal(), 13);
      break;
    case Kind::kOneHot:
      at(place) = -1.5f;
      break;
    case Kind::kNaN:
      at(place) = std::numeric_limits<float>::quiet_NaN();
      break;
    case Kind::kInfinity:
      at(place) = std::numeric_limits<float>::infinity();
      break;
    case Kind::kNegativeInfinity:
      at(place) = -std::numeric_limits<float>::infinity();
      break;
    case Kind::kMixed:
      at(place) = std::numeric_limits<float>::infinity();
      at(random.below(cols)) = -std::numeric_limits<float>::infinity();
      break;
    default:
      break;
  }
}

std::vector<float> tokens_of(int64_t count, int64_t cols, Random& random, bool all_kinds) {
  std::vector<float> x;
  for (int64_t t = 0; t < count; ++t) {
    const Kind kind =
        all_kinds ? kKinds[static_cast<size_t>(t) % std::size(kKinds)] : (t % 3 == 2 ? Kind::kOutlier : Kind::kNormal);
    append_token(kind, cols, random, x);
  }
  return x;
}

std::vector<float> one_hot(const std::vector<int64_t>& columns, int64_t cols) {
  std::vector<float> x(columns.size() * static_cast<size_t>(cols));
  for (size_t t = 0; t < columns.size(); ++t) x[t * static_cast<size_t>(cols) + static_cast<size_t>(columns[t])] = 1;
  return x;
}

}  // namespace matrix
