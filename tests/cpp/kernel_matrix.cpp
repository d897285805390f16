// The kernel matrix: every compiled tier's kernels over formats, shapes and codes, against kernel_reference.h and
// against the scalar tier, without torch. tests/kernel_build.py builds it, with csrc/formats/*.cpp and csrc/simd/*.cpp;
// it exits 0 if all is well.
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <map>
#include <string>
#include <tuple>

#include "../../csrc/simd/tier.h"
#include "kernel_banks.h"

namespace {

using banks::Bank;
using banks::Format;
using banks::Placement;
using banks::Random;
using cpu_moe::Activation;
using cpu_moe::DType;
using cpu_moe::FormatKernels;
using cpu_moe::Precision;
using cpu_moe::TierKernels;
using guarded::Side;

struct Options {
  bool quick = false;
  std::string tier, format;  // empty: all
};
Options g_options;

std::string text(const char* format, ...) __attribute__((format(printf, 1, 2)));
std::string text(const char* format, ...) {
  char buffer[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(buffer, sizeof buffer, format, arguments);
  va_end(arguments);
  return buffer;
}

// ------------------------------------------------------------------------------------------------------------- results

struct Tally {
  int64_t checks = 0, failures = 0;
};
std::map<std::pair<std::string, std::string>, Tally> g_tallies;  // of (tier, what)
Tally* g_tally = nullptr;                                        // what is being checked now

// In static storage: a signal's handler prints it.
char g_running[512];

void begin(std::string_view tier, const std::string& what, const std::string& details) {
  g_tally = &g_tallies[{std::string(tier), what}];
  std::snprintf(g_running, sizeof g_running, "%s %s %s", std::string(tier).c_str(), what.c_str(), details.c_str());
}

void fail(const std::string& how) {
  constexpr int64_t kShown = 5;  // of each tier and format
  if (g_tally->failures++ < kShown) std::printf("FAIL %s: %s\n", g_running, how.c_str());
}

// Counts a check and says whether it failed.
bool failed(bool fine) {
  ++g_tally->checks;
  return !fine;
}

void on_signal(int number) {
  const char* name = number == SIGSEGV || number == SIGBUS ? "touched memory that is not its own"
                     : number == SIGILL                    ? "illegal instruction"
                                                           : "died";
  char line[640];
  const int n = std::snprintf(line, sizeof line, "FAIL %s: %s (signal %d)\n", g_running, name, number);
  std::fflush(stdout);
  if (write(STDOUT_FILENO, line, static_cast<size_t>(n)) < 0) _exit(2);
  _exit(1);
}

struct RunningTier {
  std::string name;
  TierKernels kernels;
};

// The scalar one first, for it is what the others are compared with.
std::vector<RunningTier> g_tiers;

// ----------------------------------------------------------------------------------------------------------------- dot

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

  int64_t tokens() const { return static_cast<int64_t>(x.size()) / bank.cols; }
  int64_t row_count() const { return static_cast<int64_t>(rows.size()); }
};

std::vector<int32_t> first_rows(int64_t n) {
  std::vector<int32_t> rows;
  for (int64_t r = 0; r < n; ++r) rows.push_back(static_cast<int32_t>(r));
  return rows;
}

std::string describe(const Problem& p) {
  return text("%s: %lld columns, %lld rows, %lld tokens, %s, %s page + %d, gap %lld, layout %d", p.what.c_str(),
              static_cast<long long>(p.bank.cols), static_cast<long long>(p.row_count()),
              static_cast<long long>(p.tokens()), p.precision == Precision::kFast ? "fast" : "exact",
              p.placement.side == Side::kEnd ? "before" : "after", p.placement.shift,
              static_cast<long long>(p.placement.gap), p.placement.layout);
}

struct Results {
  std::vector<float> values;  // [tokens][rows]
  std::vector<int> planes;    // of each token
};

// prepare() and dot() as csrc/moe/layer.cpp calls them, every buffer before a forbidden page.
class Caller {
 public:
  // `garbage` is what the planes hold before: nothing may depend on it.
  Results call(const FormatKernels& kernels, const cpu_moe::Weight& w, const Problem& problem,
               const std::vector<int32_t>& rows, int64_t first_token, int64_t tokens, int garbage) {
    const int64_t cols = problem.bank.cols;
    const int64_t plane_bytes = kernels.plane_bytes(cols);
    if (failed(plane_bytes % 64 == 0)) fail(text("plane_bytes is %lld", static_cast<long long>(plane_bytes)));
    uint8_t* planes = planes_.take(static_cast<size_t>(tokens * 2 * plane_bytes), Side::kEnd, 0, garbage);
    Results results;
    std::vector<const uint8_t*> list;
    for (int64_t t = 0; t < tokens; ++t) {
      auto* x = reinterpret_cast<float*>(x_.take(static_cast<size_t>(cols) * sizeof(float)));
      std::memcpy(x, &problem.x[static_cast<size_t>((first_token + t) * cols)],
                  static_cast<size_t>(cols) * sizeof(float));
      uint8_t* out = planes + t * 2 * plane_bytes;
      const int count = kernels.prepare(x, cols, problem.precision, out);
      if (failed(count == 1 || count == 2)) fail(text("prepare returned %d", count));
      results.planes.push_back(count);
      for (int p = 0; p < count; ++p) list.push_back(out + p * plane_bytes);
    }
    const auto n = static_cast<int64_t>(rows.size());
    constexpr float kUntouched = 12345.678f;
    const int64_t stride = n + 3;
    const size_t size = (list.size() - 1) * static_cast<size_t>(stride) + static_cast<size_t>(n);
    auto* out = reinterpret_cast<float*>(out_.take(size * sizeof(float)));
    std::fill_n(out, size, kUntouched);
    kernels.dot(w, problem.expert, rows.data(), n, list.data(), static_cast<int64_t>(list.size()), out, stride);

    for (size_t p = 0; p + 1 < list.size(); ++p) {
      const float* behind = out + p * static_cast<size_t>(stride) + n;
      if (failed(std::count(behind, behind + 3, kUntouched) == 3)) fail("wrote between the results of two planes");
    }
    const float* plane = out;
    for (int64_t t = 0; t < tokens; ++t) {
      const bool two = results.planes[static_cast<size_t>(t)] == 2;
      for (int64_t j = 0; j < n; ++j) results.values.push_back(two ? plane[j] + plane[stride + j] : plane[j]);
      plane += (two ? 2 : 1) * stride;
    }
    return results;
  }

 private:
  guarded::Arena x_, planes_, out_;
};

// A NaN's sign and payload are nobody's promise.
bool same_bits(float a, float b) {
  return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b) || (std::isnan(a) && std::isnan(b));
}

void check(const Problem& problem) {
  static Caller caller;
  static banks::Placed placed;
  const reference::Activations how = problem.format.activations(problem.precision);
  const bool dense = problem.format.scale_block == 0;
  const int64_t n = problem.row_count();

  std::vector<reference::Expected> expected;
  {
    std::vector<reference::Row> rows;
    for (const int32_t r : problem.rows) {
      rows.emplace_back(banks::decode(problem.format, problem.bank, problem.expert, r), how);
    }
    for (int64_t t = 0; t < problem.tokens(); ++t) {
      const reference::Token token(&problem.x[static_cast<size_t>(t * problem.bank.cols)], problem.bank.cols, how);
      for (const reference::Row& row : rows) expected.push_back(reference::dot(row, token, dense));
    }
  }

  const cpu_moe::Weight w = placed.place(problem.bank, problem.placement);
  const std::string details = describe(problem);
  Results scalar;
  for (const RunningTier& tier : g_tiers) {
    begin(tier.name, problem.format.id(), details);
    const FormatKernels& kernels = tier.kernels.formats[problem.format.index()];
    const Results got = caller.call(kernels, w, problem, problem.rows, 0, problem.tokens(), 0xFF);
    if (scalar.values.empty()) scalar = got;
    for (size_t i = 0; i < expected.size(); ++i) {
      const size_t t = i / static_cast<size_t>(n), j = i % static_cast<size_t>(n);
      const reference::Expected& want = expected[i];
      const float value = got.values[i];
      const bool two = got.planes[t] == 2;
      if (failed(reference::fits(want, static_cast<double>(value), two))) {
        constexpr const char* kKinds[] = {"", " NaN", " infinite", " not finite", " beyond float32"};
        fail(text("token %zu, row %d: got %.9g, expected%s %.9g +- %.3g (%d planes)", t, problem.rows[j],
                  static_cast<double>(value), kKinds[want.kind], want.value, two ? want.fine_bound : want.bound,
                  got.planes[t]));
      }
      // Tiers hold the same activations, so they differ by no more than float32 arithmetic.
      const double between = problem.precision == Precision::kFast ? want.bound : want.arithmetic;
      const double difference = std::fabs(static_cast<double>(value) - static_cast<double>(scalar.values[i]));
      if (want.kind == reference::Expected::kWithin && failed(difference <= 2 * between)) {
        fail(text("token %zu, row %d: got %.9g, the scalar tier has %.9g; allowed are %.3g", t, problem.rows[j],
                  static_cast<double>(value), static_cast<double>(scalar.values[i]), 2 * between));
      }
    }
    if (!problem.alone) continue;
    const auto compare = [&](const Results& other, size_t first, size_t step, const char* what) {
      for (size_t i = 0; i < other.values.size(); ++i) {
        const size_t at = first + i * step;
        if (failed(same_bits(other.values[i], got.values[at]))) {
          fail(text("token %zu, row %d: %.9g, but %.9g %s", at / static_cast<size_t>(n),
                    problem.rows[at % static_cast<size_t>(n)], static_cast<double>(got.values[at]),
                    static_cast<double>(other.values[i]), what));
        }
      }
    };
    for (int64_t t = 0; t < problem.tokens(); ++t) {
      compare(caller.call(kernels, w, problem, problem.rows, t, 1, 0x00), static_cast<size_t>(t * n), 1, "alone");
    }
    for (int64_t j = 0; j < n; ++j) {
      const std::vector<int32_t> row = {problem.rows[static_cast<size_t>(j)]};
      compare(caller.call(kernels, w, problem, row, 0, problem.tokens(), 0x7F), static_cast<size_t>(j),
              static_cast<size_t>(n), "as the only row");
    }
  }
}

// ----------------------------------------------------------------------------------------------------------
// activations

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

std::vector<float> tokens_of(int64_t count, int64_t cols, Random& random, bool all_kinds = false) {
  std::vector<float> x;
  for (int64_t t = 0; t < count; ++t) {
    const Kind kind =
        all_kinds ? kKinds[static_cast<size_t>(t) % std::size(kKinds)] : (t % 3 == 2 ? Kind::kOutlier : Kind::kNormal);
    append_token(kind, cols, random, x);
  }
  return x;
}

// A token for each of `columns`: 1 there, else 0.
std::vector<float> one_hot(const std::vector<int64_t>& columns, int64_t cols) {
  std::vector<float> x(columns.size() * static_cast<size_t>(cols));
  for (size_t t = 0; t < columns.size(); ++t) x[t * static_cast<size_t>(cols) + static_cast<size_t>(columns[t])] = 1;
  return x;
}

// Another corner of memory in each case.
Placement placement_of(int64_t number) {
  Placement p;
  p.side = number % 2 != 0 ? Side::kStart : Side::kEnd;
  p.shift = number % 3 == 0 ? 0 : static_cast<int>(number * 5 % 67);
  p.gap = number % 4 == 0 ? 0 : number * 7 % 130;
  p.layout = static_cast<Placement::Layout>(number % 3);
  return p;
}

// ----------------------------------------------------------------------------------------------------------------
// cases

// Blocks in a vector of scales of the widest tier: a group of weights, for the formats that have groups.
constexpr int64_t kWidestGroup = 16;

// Every code in every position of a group, each seen alone.
void codes_in_every_position(const Format& format, const std::vector<uint32_t>& finite) {
  if (finite.empty() || finite.size() > 256) return;
  const int64_t block = format.spec().block;
  const int64_t cols =
      block > 1 ? block * (g_options.quick ? kWidestGroup + 1 : 2 * kWidestGroup + 1) : (g_options.quick ? 130 : 300);
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
  for (int64_t c = 0; c < cols; c += g_options.quick ? 15 : 1) columns.push_back(c);
  check({format, "codes", bank, first_rows(rows), one_hot(columns, cols)});
}

// Codes that are no finite number, in every column; the rows between are not touched by them.
void special_codes(const Format& format, const std::vector<uint32_t>& special) {
  if (special.empty()) return;
  const int64_t cols = g_options.quick ? 70 : 261;
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

// Every scale in every block of a group (the f16 ones, which are too many, in some), each seen alone and all together.
void scales(const Format& format) {
  std::vector<uint32_t> all = format.scales();
  if (all.empty()) return;
  const int64_t row_block = format.spec().parts[format.spec().part_count > 1 ? 1 : 0].row_block;
  const int64_t blocks = format.scale_block == 128 ? 3 : g_options.quick ? kWidestGroup + 1 : 2 * kWidestGroup + 1;
  const int64_t cols = format.scale_block == 128 ? 2 * 128 + 44 : blocks * format.scale_block;
  const bool many = all.size() > 256;
  if (many && g_options.quick) {
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
  const std::vector<int> gains =
      many || g_options.quick ? std::vector<int>{0, -60} : std::vector<int>{0, 30, -30, 100, -100};
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
  if (format.scale_dtype == DType::kE4M3) list = {0x01, 0x08, 0x38, 0x7E, 0xFE};
  if (format.scale_dtype == DType::kU8) list = {0, 1, 22, 24, 100, 127, 200, 253, 254};
  if (format.name == "q4_0") list = {0x0001, 0x03FF, 0x0400, 0x3C00, 0x7BFF, 0xFBFF};
  if (format.scale_block == 128) {
    for (const double scale : {1.0, 0x1p126, 1e30, 0x1p-100, 0x1p-126, 0x1p-149}) list.push_back(banks::bits_of(scale));
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

// Numbers of columns, rows and tokens, a tail of every length, in changing places.
void shapes(const Format& format) {
  const int64_t block = format.spec().block;
  std::vector<int64_t> widths;
  if (block > 1) {
    for (int64_t b = 1; b <= 2 * kWidestGroup + 1; ++b) widths.push_back(b * block);
  } else {
    for (int64_t c = 1; c <= 260; ++c) {
      if (!g_options.quick || c <= 34 || c % 32 <= 1) widths.push_back(c);
    }
  }
  for (const int64_t c : {33, 704, 1000, 2880}) widths.push_back((c + block - 1) / block * block);
  int64_t number = 0;
  for (const int64_t cols : widths) {
    ++number;
    Random random(static_cast<uint64_t>(100 + number));
    const int64_t rows = 1 + number % 5, tokens = 1 + number * 7 % 17;
    for (const Precision precision : {Precision::kExact, Precision::kFast}) {
      if (g_options.quick && (number % 2 == 0) == (precision == Precision::kFast)) continue;
      Problem problem{format,
                      text("shapes %d", static_cast<int>(number)),
                      banks::random_bank(format, rows, cols, random),
                      first_rows(rows),
                      tokens_of(tokens, cols, random),
                      precision};
      problem.placement = placement_of(number);
      problem.alone = !g_options.quick;
      check(problem);
    }
  }
}

// Every number of rows beside every number of tokens; rows in any order and more than once.
void companies(const Format& format) {
  const int64_t block = format.spec().block;
  for (const int64_t blocks : {3, 11}) {
    const int64_t cols = block == 1 ? blocks * 13 : blocks * block;
    if (g_options.quick && blocks != 3) continue;
    Random random(static_cast<uint64_t>(6 + blocks));
    const Bank bank = banks::random_bank(format, 140, cols, random);
    for (int64_t rows = 1; rows <= 5; ++rows) {
      for (int64_t tokens = 1; tokens <= 17; ++tokens) {
        if (g_options.quick && tokens > 5 && tokens % 3 != rows % 3) continue;
        Problem problem{format, "companies", bank, {}, tokens_of(tokens, cols, random)};
        constexpr int32_t kChoices[] = {139, 3, 127, 128, 3, 129, 0, 139};
        for (int64_t r = 0; r < rows; ++r) problem.rows.push_back(kChoices[(r + tokens) % 8]);
        problem.alone = true;
        check(problem);
      }
    }
  }
}

// Activations of every kind side by side: none may notice the others.
void activations(const Format& format) {
  const int64_t block = format.spec().block;
  std::vector<int64_t> widths = {block, 160, 1056};
  if (!g_options.quick) widths.insert(widths.end(), {1, 5, 320, 2880});
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
        for (int64_t order = 0; order < (g_options.quick ? 1 : 3); ++order) {
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

// At every address, before and behind forbidden pages.
void places(const Format& format) {
  const int64_t block = format.spec().block;
  for (const int64_t blocks : {1, 3, 19}) {
    const int64_t cols = block == 1 ? blocks * 7 : blocks * block;
    Random random(static_cast<uint64_t>(8 + blocks));
    const Bank bank = banks::random_bank(format, 2, cols, random);
    const std::vector<float> x = tokens_of(5, cols, random);
    for (const Side side : {Side::kStart, Side::kEnd}) {
      for (int shift = 0; shift < 66; shift += g_options.quick ? 5 : shift < 17 ? 1 : 3) {
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

// ---------------------------------------------------------------------------------------------------------
// element-wise

void expect(double got, double want, double bound, const std::string& what) {
  const bool fine = std::isnan(want)   ? std::isnan(got)
                    : std::isinf(want) ? got == want
                                       : std::fabs(got - want) <= bound;
  if (failed(fine)) fail(text("%s: got %.9g, expected %.9g +- %.3g", what.c_str(), got, want, bound));
}

// Copies of arrays of floats, each before a forbidden page or behind one.
class Floats {
 public:
  float* operator()(const float* values, int64_t n, Side side) {
    auto* copy = reinterpret_cast<float*>(arenas_[next_++ % std::size(arenas_)].take(static_cast<size_t>(n) * 4, side));
    if (values != nullptr && n > 0) std::memcpy(copy, values, static_cast<size_t>(n) * sizeof(float));
    return copy;
  }

 private:
  guarded::Arena arenas_[16];
  size_t next_ = 0;
};

struct Gated {
  double value, bound;
};

// act(gate) * up and the bound of tests/reference.py's activate().
Gated gated(Activation activation, double alpha, double limit, double gate, double up) {
  if (activation == Activation::kSwigluOai || activation == Activation::kSwigluClamp) {
    if (gate > limit) gate = limit;
    if (up > limit) up = limit;
    if (up < -limit) up = -limit;
  }
  if (activation == Activation::kSwigluOai) up += 1;
  double f = 0;
  const auto swish = [](double x, double scale) { return x / (1 + std::exp(-scale * x)); };
  switch (activation) {
    case Activation::kSilu:
    case Activation::kSwigluClamp:
      f = swish(gate, 1);
      break;
    case Activation::kSwigluOai:
      f = swish(gate, alpha);
      break;
    case Activation::kGelu:
      f = 0.5 * gate * std::erfc(-gate / std::sqrt(2.0));
      break;
    case Activation::kGeluTanh:
      f = swish(gate, 2 * std::sqrt(2 / std::acos(-1.0)) * (1 + 0.044715 * gate * gate));
      break;
    case Activation::kRelu2:
      f = gate > 0 || std::isnan(gate) ? gate * gate : 0;
      break;
  }
  const bool cancels = activation == Activation::kGelu || activation == Activation::kGeluTanh;
  double own = 0x1p-20 * std::fabs(f) + 1e-36 + (cancels ? 0x1p-22 * std::fabs(gate) : 0);
  // alpha * gate is rounded, and exp magnifies that (where the layer's tests have the gate's own error, far larger).
  if (activation == Activation::kSwigluOai) own += 2 * reference::kHalfUlp * std::fabs(alpha * gate * f);
  const double value = f * up;
  return {value, own * std::fabs(up) + 0x1p-22 * std::fabs(value) * 2 + 1e-37 + 0x1p-148};
}

void check_glu(const RunningTier& tier) {
  constexpr struct {
    const char* name;
    Activation activation;
    float alpha, limit;
  } kCases[] = {
      {"silu", Activation::kSilu, 1.702f, HUGE_VALF},
      {"gelu", Activation::kGelu, 1.702f, HUGE_VALF},
      {"gelu_tanh", Activation::kGeluTanh, 1.702f, HUGE_VALF},
      {"relu2", Activation::kRelu2, 1.702f, HUGE_VALF},
      {"swigluoai", Activation::kSwigluOai, 1.702f, HUGE_VALF},
      {"swigluoai", Activation::kSwigluOai, 1.702f, 7.0f},
      {"swigluoai", Activation::kSwigluOai, 1.0f, 10.0f},
      {"swiglu_clamp", Activation::kSwigluClamp, 1.702f, HUGE_VALF},
      {"swiglu_clamp", Activation::kSwigluClamp, 1.702f, 7.0f},
  };
  Floats floats;
  Random random(9);
  for (const auto& c : kCases) {
    std::vector<float> gates, ups;
    const auto add = [&](double gate, double up) {
      gates.push_back(static_cast<float>(gate));
      ups.push_back(static_cast<float>(up));
    };
    for (int i = -1000; i <= 1000; ++i) add(i / 10.0, 1);
    for (int i = -400; i <= 400; ++i) add(i / 200.0, random.normal());
    for (const double gate : {-1e30, -1e4, -87.0, -0.0, 0.0, 1e-20, 1e-40, 6.9, 7.1, 1e4, 1e18}) {
      for (const double up : {-20.0, -7.5, -1.0, 0.0, 1e-30, 1.0, 7.1, 1e15}) add(gate, up);
    }
    for (const double special : {std::nan(""), static_cast<double>(HUGE_VALF)}) {
      add(special, 2);
      add(2, special);
    }
    begin(tier.name, "glu",
          text("%s, alpha %g, limit %g", c.name, static_cast<double>(c.alpha), static_cast<double>(c.limit)));
    const auto n = static_cast<int64_t>(gates.size());
    std::vector<float> all(gates.size());
    tier.kernels.glu(c.activation, c.alpha, c.limit, gates.data(), ups.data(), n, all.data());
    for (size_t i = 0; i < gates.size(); ++i) {
      const auto gate = static_cast<double>(gates[i]), up = static_cast<double>(ups[i]);
      const Gated want = gated(c.activation, static_cast<double>(c.alpha), static_cast<double>(c.limit), gate, up);
      if (std::fabs(want.value) + want.bound > static_cast<double>(FLT_MAX) && std::isfinite(want.value)) continue;
      expect(static_cast<double>(all[i]), want.value, want.bound, text("gate %.9g, up %.9g", gate, up));
    }
    // Where in a call a value stands, and whether in its tail, changes nothing.
    for (int64_t length = 0; length <= 70; ++length) {
      for (const Side side : {Side::kStart, Side::kEnd}) {
        const int64_t first = random.below(n - length);
        const float* gate = floats(&gates[static_cast<size_t>(first)], length, side);
        const float* up = floats(&ups[static_cast<size_t>(first)], length, side);
        float* out = floats(nullptr, length, side);
        tier.kernels.glu(c.activation, c.alpha, c.limit, gate, up, length, out);
        for (int64_t i = 0; i < length; ++i) {
          const float whole = all[static_cast<size_t>(first + i)];
          if (failed(same_bits(out[i], whole))) {
            fail(text("gate %.9g, up %.9g at %d of %d: %.9g, elsewhere %.9g", static_cast<double>(gate[i]),
                      static_cast<double>(up[i]), static_cast<int>(i), static_cast<int>(length),
                      static_cast<double>(out[i]), static_cast<double>(whole)));
          }
        }
      }
    }
  }
}

void check_combine(const RunningTier& tier) {
  Floats floats;
  Random random(10);
  for (int64_t n = 0; n <= 70; ++n) {
    for (const int64_t count : {0, 1, 2, 8, 13}) {
      for (const Side side : {Side::kStart, Side::kEnd}) {
        begin(tier.name, "combine", text("%d parts of %d", static_cast<int>(count), static_cast<int>(n)));
        std::vector<const float*> parts;
        std::vector<float> weights;
        for (int64_t s = 0; s < count; ++s) {
          std::vector<float> values;
          for (int64_t i = 0; i < n; ++i) values.push_back(static_cast<float>(random.normal()));
          parts.push_back(floats(values.data(), n, side));
          weights.push_back(static_cast<float>(random.uniform() - 0.2));
        }
        float* out = floats(nullptr, n, side);
        tier.kernels.combine(parts.data(), weights.data(), count, n, out);
        for (int64_t i = 0; i < n; ++i) {
          double want = 0, size = 0;
          for (int64_t s = 0; s < count; ++s) {
            const double product = static_cast<double>(parts[static_cast<size_t>(s)][i]) *
                                   static_cast<double>(weights[static_cast<size_t>(s)]);
            want += product;
            size += std::fabs(product);
          }
          expect(static_cast<double>(out[i]), want, (static_cast<double>(count) + 3) * reference::kHalfUlp * size,
                 text("element %d", static_cast<int>(i)));
        }
        // An element by itself has the same bits.
        for (int64_t i = 0; i < n; i += 1 + n / 7) {
          std::vector<const float*> one;
          for (const float* part : parts) one.push_back(part + i);
          float value;
          tier.kernels.combine(one.data(), weights.data(), count, 1, &value);
          if (failed(same_bits(value, out[i]))) fail(text("element %d has other bits alone", static_cast<int>(i)));
        }
      }
    }
  }
}

void check_load_and_store(const RunningTier& tier) {
  constexpr struct {
    const char* name;
    DType dtype;
    double (*decode)(uint32_t);
    double (*round)(double);
  } kTypes[] = {
      {"f32", DType::kF32, banks::f32, nullptr},
      {"f16", DType::kF16, reference::f16, reference::round_f16},
      {"bf16", DType::kBF16, reference::bf16, reference::round_bf16},
  };
  guarded::Arena in, out;
  Random random(11);
  for (const auto& type : kTypes) {
    const int64_t size = cpu_moe::size_of(type.dtype);
    begin(tier.name, "load", text("%s: every code", type.name));
    std::vector<uint8_t> codes;
    for (uint32_t i = 0; i < 65536; ++i) {
      const uint32_t code = size == 2 ? i : static_cast<uint32_t>(random.bits());
      const auto* bytes = reinterpret_cast<const uint8_t*>(&code);
      codes.insert(codes.end(), bytes, bytes + size);
    }
    std::vector<float> values(65536);
    tier.kernels.load(type.dtype, codes.data(), 65536, values.data());
    for (size_t i = 0; i < 65536; ++i) {
      uint32_t code = 0;
      std::memcpy(&code, &codes[i * static_cast<size_t>(size)], static_cast<size_t>(size));
      expect(static_cast<double>(values[i]), type.decode(code), 0, text("code 0x%x", code));
    }
    // What store() must round: everything near a code, and floats of any bits.
    for (size_t i = 0; i < 65536; ++i) {
      if (i % 2 != 0) {
        values[i] = std::bit_cast<float>(static_cast<uint32_t>(random.bits()));
      } else if (std::isfinite(values[i])) {
        auto step = static_cast<uint32_t>(random.below(3)) * 0x1000u - 1;
        step += static_cast<uint32_t>(random.below(3));
        values[i] = std::bit_cast<float>(std::bit_cast<uint32_t>(values[i]) + step);
      }
    }
    std::vector<uint8_t> stored(codes.size());
    begin(tier.name, "store", type.name);
    tier.kernels.store(type.dtype, values.data(), 65536, stored.data());
    for (size_t i = 0; i < 65536; ++i) {
      uint32_t code = 0;
      std::memcpy(&code, &stored[i * static_cast<size_t>(size)], static_cast<size_t>(size));
      const auto value = static_cast<double>(values[i]);
      expect(type.decode(code), type.round == nullptr ? value : type.round(value), 0, text("%.9g", value));
    }
    for (int64_t n = 0; n <= 70; ++n) {
      for (const Side side : {Side::kStart, Side::kEnd}) {
        for (size_t shift = 0; shift < 2; ++shift) {  // odd addresses too
          begin(tier.name, "load", text("%s: %d", type.name, static_cast<int>(n)));
          const int64_t first = random.below(65000);
          uint8_t* from = in.take(static_cast<size_t>(n * size), side, shift);
          if (n > 0) std::memcpy(from, &codes[static_cast<size_t>(first * size)], static_cast<size_t>(n * size));
          auto* to = reinterpret_cast<float*>(out.take(static_cast<size_t>(n) * sizeof(float), side));
          tier.kernels.load(type.dtype, from, n, to);
          for (int64_t i = 0; i < n; ++i) {
            uint32_t code = 0;
            std::memcpy(&code, from + i * size, static_cast<size_t>(size));
            expect(static_cast<double>(to[i]), type.decode(code), 0, text("code 0x%x", code));
          }
          begin(tier.name, "store", text("%s: %d", type.name, static_cast<int>(n)));
          auto* floats = reinterpret_cast<float*>(in.take(static_cast<size_t>(n) * sizeof(float), side));
          if (n > 0) std::memcpy(floats, &values[static_cast<size_t>(first)], static_cast<size_t>(n) * sizeof(float));
          uint8_t* bytes = out.take(static_cast<size_t>(n * size), side, shift);
          tier.kernels.store(type.dtype, floats, n, bytes);
          for (int64_t i = 0; i < n; ++i) {
            uint32_t code = 0;
            std::memcpy(&code, bytes + i * size, static_cast<size_t>(size));
            const auto value = static_cast<double>(floats[i]);
            expect(type.decode(code), type.round == nullptr ? value : type.round(value), 0, text("%.9g", value));
          }
        }
      }
    }
  }
}

void check_stream_read(const RunningTier& tier) {
  guarded::Arena arena;
  Random random(12);
  for (int variant = 0; variant < cpu_moe::kStreamReadVariants; ++variant) {
    for (int64_t n : {0, 1, 3, 63, 64, 65, 255, 257, 1023, 4097, 20011}) {
      for (const Side side : {Side::kStart, Side::kEnd}) {
        begin(tier.name, "stream_read", text("variant %d, %d bytes", variant, static_cast<int>(n)));
        uint8_t* data = arena.take(static_cast<size_t>(n), side);
        for (int64_t i = 0; i < n; ++i) data[i] = static_cast<uint8_t>(random.bits());
        // Its low 32 bits are the sum of the words of each of the ranges that it reads side by side; all of them are
        // whole but the last. As a sum of bytes times their place in a word, with 4-byte ranges this is that of all.
        const auto total = static_cast<uint32_t>(tier.kernels.stream_read(data, n, variant));
        uint32_t want = 0;
        for (int64_t i = 0; i < n; ++i) want += static_cast<uint32_t>(data[i]) << (i % 4 * 8);
        if (failed(total == want)) fail(text("got the sum %u, expected %u", total, want));
      }
    }
  }
}

// -----------------------------------------------------------------------------------------------------------------
// main

int usage(const char* program) {
  std::fprintf(stderr,
               "usage: %s [--quick] [--tier NAME] [--format NAME] [--list]\n"
               "  --quick   fewer shapes and codes: for sanitizers and emulators\n"
               "  --tier    this one (beside scalar, which it is compared with)\n"
               "  --format  this one, and nothing that is element-wise\n"
               "  --list    names the tiers that were compiled, best first, and which run here\n",
               program);
  return 2;
}

int run() {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  bool known = g_options.tier.empty();
  for (const cpu_moe::Tier& tier : cpu_moe::compiled_tiers()) {
    const bool wanted = g_options.tier.empty() || tier.name == g_options.tier;
    known |= tier.name == g_options.tier;
    if (!tier.supported()) {
      if (wanted) std::printf("not run: %s (not supported by this CPU)\n", std::string(tier.name).c_str());
    } else if (wanted || tier.name == "scalar") {
      g_tiers.insert(tier.name == "scalar" ? g_tiers.begin() : g_tiers.end(), {std::string(tier.name), tier.kernels()});
    }
  }
  if (!known) {
    std::fprintf(stderr, "no tier %s in this build\n", g_options.tier.c_str());
    return 2;
  }
  for (const cpu_moe::FormatSpec& spec : cpu_moe::registry()) {
    bool covered = false;
    for (const Format& format : banks::kFormats) covered |= format.name == spec.name;
    if (!covered) {
      std::printf("FAIL the matrix has no format %s\n", std::string(spec.name).c_str());
      return 1;
    }
  }
  known = g_options.format.empty();
  for (const Format& format : banks::kFormats) {
    if (!g_options.format.empty() && format.id() != g_options.format) continue;
    known = true;
    const auto [finite, special] = banks::sort_codes(format);
    codes_in_every_position(format, finite);
    codes_once(format, finite);
    special_codes(format, special);
    scales(format);
    scale_pairs(format);
    global_scales(format);
    shapes(format);
    companies(format);
    activations(format);
    places(format);
  }
  if (!known) {
    std::fprintf(stderr, "no format %s\n", g_options.format.c_str());
    return 2;
  }
  if (g_options.format.empty()) {
    for (const RunningTier& tier : g_tiers) {
      check_glu(tier);
      check_combine(tier);
      check_load_and_store(tier);
      check_stream_read(tier);
    }
  }
  int64_t checks = 0, failures = 0;
  for (const auto& [key, tally] : g_tallies) {
    std::printf("%s %-12s %-14s %9lld checks", tally.failures != 0 ? "FAIL" : "ok  ", key.first.c_str(),
                key.second.c_str(), static_cast<long long>(tally.checks));
    if (tally.failures != 0) std::printf(", %lld failed", static_cast<long long>(tally.failures));
    std::printf("\n");
    checks += tally.checks;
    failures += tally.failures;
  }
  const std::chrono::duration<double> seconds = Clock::now() - start;
  std::printf("kernel matrix%s: %lld checks, %lld failed, %.1f s\n", g_options.quick ? " (quick)" : "",
              static_cast<long long>(checks), static_cast<long long>(failures), seconds.count());
  return failures == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument == "--quick") {
      g_options.quick = true;
    } else if (argument == "--list") {
      for (const cpu_moe::Tier& tier : cpu_moe::compiled_tiers()) {
        std::printf("%s%s\n", std::string(tier.name).c_str(), tier.supported() ? "" : " (not supported by this CPU)");
      }
      return 0;
    } else if ((argument == "--tier" || argument == "--format") && i + 1 < argc) {
      (argument == "--tier" ? g_options.tier : g_options.format) = argv[++i];
    } else {
      return usage(argv[0]);
    }
  }
  for (const int number : {SIGSEGV, SIGBUS, SIGILL, SIGFPE}) signal(number, on_signal);
  return run();
}
