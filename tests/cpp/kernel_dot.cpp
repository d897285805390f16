#include "kernel_dot.h"

#include <algorithm>
#include <cstdio>

#include "kernel_report.h"

namespace matrix {

std::vector<RunningTier> g_tiers;

namespace {

using cpu_moe::FormatKernels;

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

}  // namespace

bool choose_tiers(std::string_view only) {
  bool known = only.empty();
  for (const cpu_moe::Tier& tier : cpu_moe::compiled_tiers()) {
    const bool wanted = only.empty() || tier.name == only;
    known |= tier.name == only;
    if (!tier.supported()) {
      if (wanted) std::printf("not run: %s (not supported by this CPU)\n", std::string(tier.name).c_str());
    } else if (wanted || tier.name == "scalar") {
      g_tiers.insert(tier.name == "scalar" ? g_tiers.begin() : g_tiers.end(), {std::string(tier.name), tier.kernels()});
    }
  }
  return known;
}

std::vector<int32_t> first_rows(int64_t n) {
  std::vector<int32_t> rows;
  for (int64_t r = 0; r < n; ++r) rows.push_back(static_cast<int32_t>(r));
  return rows;
}

bool same_bits(float a, float b) {
  return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b) || (std::isnan(a) && std::isnan(b));
}

void check(const Problem& problem) {
  static Caller caller;
  static banks::Placed placed;
  reference::Activations how = problem.format.activations(problem.precision);
  if (problem.worst_rounding) {
    if (how.step == reference::kInt16Step) how.step = reference::kInt16WorstStep;
    how.fine_step = reference::kTwoPlanesWorstStep;
  }
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
      const bool lost = problem.allow_lost_infinities && two && want.kind == reference::Expected::kInfinite;
      if (failed(reference::fits(want, static_cast<double>(value), two) || (lost && std::isnan(value)))) {
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

}  // namespace matrix
