// A fuzzer of the kernels: bytes become a format, a shape, weights, activations and their places in memory, and every
// tier that runs here must be within the bound of kernel_reference.h, the same alone as in company, and inside of its
// memory.
//
// With -DCPU_MOE_LIBFUZZER and clang's -fsanitize=fuzzer it is a libFuzzer target; else it has a main() that runs
// random inputs from seeds, or files that libFuzzer left (CONTRIBUTING.md has the commands).
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <utility>

#include "kernel_dot.h"
#include "kernel_report.h"

namespace matrix {
namespace {

// The input's bytes, then random ones that follow from them.
class Input {
 public:
  Input(const uint8_t* data, size_t size) : at_(data), end_(data + size), more_(hash(data, size)) {}

  int64_t below(int64_t n) {
    uint64_t value = next();
    for (int64_t limit = 256; limit < n; limit *= 256) value = value << 8 | next();
    return static_cast<int64_t>(value % static_cast<uint64_t>(n));
  }
  int64_t between(int64_t least, int64_t most) { return least + below(most - least + 1); }
  bool one_in(int64_t n) { return below(n) == 0; }
  uint32_t bits() { return static_cast<uint32_t>(below(int64_t{1} << 32)); }
  // Of magnitudes from 1 to 2, exact in bf16 or with all of float32's bits.
  double significand() {
    const int64_t fine = below(256);
    const double fraction = one_in(2) ? static_cast<double>(fine) / 256 : static_cast<double>(bits() >> 9) * 0x1p-23;
    return below(2) == 0 ? 1 + fraction : -1 - fraction;
  }

 private:
  static uint64_t hash(const uint8_t* data, size_t size) {  // FNV-1a
    uint64_t h = 0xCBF29CE484222325u;
    for (size_t i = 0; i < size; ++i) h = (h ^ data[i]) * 0x100000001B3u;
    return h;
  }
  uint8_t next() { return at_ != end_ ? *at_++ : static_cast<uint8_t>(more_.bits() >> 32); }

  const uint8_t* at_;
  const uint8_t* end_;
  Random more_;
};

bool finite_code(const Format& format, uint32_t code) {
  Bank one = banks::empty_bank(format, 1, format.spec().block);
  format.set_code(one, 0, 0, 0, code);
  return std::isfinite(format.weight(one, 0, 0, 0));
}

uint32_t code_of(const Format& format, Input& in) {
  return format.codes == 0 ? in.bits() : static_cast<uint32_t>(in.below(format.codes));
}

void fill_codes(const Format& format, Bank& bank, int64_t row, Input& in) {
  enum : int64_t { kAny, kFinite, kOne, kFew, kSame };
  const int64_t kind = in.one_in(16) ? int64_t{kAny} : in.between(kFinite, kSame);
  const bool dense = format.scale_block == 0;
  // A dense weight takes any magnitude, so a row's are kept together: sums in float32 are all that is promised.
  const auto exponent = static_cast<int>(in.one_in(4) ? in.between(-140, 120) : in.between(-20, 20));
  const auto finite = [&] {
    if (dense) {
      const double weight = std::ldexp(in.significand(), exponent - static_cast<int>(in.below(12)));
      if (bank.dtype[0] == DType::kF32) return banks::bits_of(weight);
      if (bank.dtype[0] == DType::kBF16) return banks::bits_of(weight) >> 16;
    }
    uint32_t code = code_of(format, in);
    while (!finite_code(format, code)) code = code == 0 ? 1 : code - 1;
    return code;
  };
  const uint32_t same = finite();
  const int64_t few = in.below(bank.cols);
  for (int64_t c = 0; c < bank.cols; ++c) {
    uint32_t code = same;
    if (kind == kAny) code = code_of(format, in);
    if (kind == kFinite) code = finite();
    if (kind == kOne) code = format.one;
    if (kind == kFew) code = c == few || in.one_in(24) ? finite() : 0;
    if (format.name == "q4_0" && kind == kFew && code == 0) code = 8;  // its zero
    format.set_code(bank, 1, row, c, code);
    format.set_code(bank, 0, row, c, code);
  }
}

void fill_scales(const Format& format, Bank& bank, int64_t row, Input& in) {
  if (format.scale_block == 0) return;
  static const auto all = [] {
    std::vector<std::vector<uint32_t>> lists;
    for (const Format& f : banks::kFormats) lists.push_back(f.scales());
    return lists;
  }();
  const std::vector<uint32_t>& list = all[static_cast<size_t>(&format - banks::kFormats)];
  Random random(in.bits());
  const int64_t kind = in.below(4);
  const uint32_t same = list[static_cast<size_t>(in.below(static_cast<int64_t>(list.size())))];
  for (int64_t block = 0; block * format.scale_block < bank.cols; ++block) {
    uint32_t scale = format.scale_one;
    if (kind == 0) scale = list[static_cast<size_t>(in.below(static_cast<int64_t>(list.size())))];
    if (kind == 1) scale = format.random_scale(random, bank.cols);
    if (kind == 2) scale = same;
    for (int64_t e = 0; e < banks::kExperts; ++e) format.set_scale(bank, e, row, block, scale);
  }
  if (format.spec().part_count != 3 || in.one_in(2)) return;
  const std::vector<uint32_t>& globals = banks::float_scales();
  const uint32_t global = globals[static_cast<size_t>(in.below(static_cast<int64_t>(globals.size())))];
  for (int64_t e = 0; e < banks::kExperts; ++e) banks::write(bank.at(2, e, row, 0), global);
}

// A token, within limits that are known: q4_0's 8-bit rule multiplies two scales before the sums that they scale, which
// may overflow for nothing; and within a block of 16-bit activations, values 2^126 below the largest count as zeros.
void append_activations(const Problem& problem, Input& in, std::vector<float>& x) {
  const Format& format = problem.format;
  const int64_t cols = problem.bank.cols;
  enum : int64_t { kNear, kSpread, kWide, kSparse, kOneHot, kZero, kSpecial };
  const int64_t kind = in.one_in(12) ? int64_t{kSpecial} : in.between(kNear, kZero);
  const int64_t most = format.name == "q4_0" && problem.precision == Precision::kFast ? 90 : 126;
  const int64_t middle = in.one_in(3) ? in.between(-140, 120) : in.between(-8, 8);
  const int64_t reach = kind == kSpread ? 12 : kind == kWide ? 260 : 0;
  const int64_t place = in.below(cols);
  const int64_t span = format.activation_block == 0 ? 16 : format.activation_block;
  int64_t exponent = 0;
  for (int64_t c = 0; c < cols; ++c) {
    if (c % span == 0 || kind == kSpread)
      exponent = std::clamp<int64_t>(middle + in.between(-reach, reach), -149, most);
    const bool zero = kind == kZero || (kind == kOneHot && c != place) || (kind == kSparse && !in.one_in(8));
    x.push_back(zero ? 0.0f : static_cast<float>(std::ldexp(in.significand(), static_cast<int>(exponent))));
  }
  if (kind != kSpecial) return;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const auto outlier = static_cast<float>(std::ldexp(in.significand(), static_cast<int>(std::min(most, middle + 100))));
  const float specials[] = {std::numeric_limits<float>::quiet_NaN(), kInfinity, -kInfinity, -0.0f, outlier, outlier};
  x[x.size() - static_cast<size_t>(cols - place)] = specials[in.below(6)];
}

// False when a check failed.
bool try_input(const uint8_t* data, size_t size) {
  Input in(data, size);
  const Format& format = banks::kFormats[in.below(static_cast<int64_t>(std::size(banks::kFormats)))];
  const int64_t block = format.spec().block;
  const int64_t cols = block > 1 ? block * in.between(1, 40) : in.between(1, 330);
  // Rows on both sides of a block of them, where a format has such.
  const int64_t rows = in.between(1, 5) + (format.scale_block == 128 && in.one_in(4) ? 126 : 0);
  Problem problem{format, "fuzz", banks::empty_bank(format, rows, cols), {}, {}};
  problem.precision = in.one_in(4) ? Precision::kFast : Precision::kExact;
  problem.placement.side = in.one_in(2) ? Side::kStart : Side::kEnd;
  problem.placement.shift = static_cast<int>(in.below(67));
  problem.placement.gap = in.below(131);
  problem.placement.layout = static_cast<Placement::Layout>(in.below(3));
  problem.expert = in.below(2);
  problem.alone = in.one_in(3);
  problem.worst_rounding = problem.allow_lost_infinities = true;
  for (int64_t r = std::max<int64_t>(0, rows - 5); r < rows; ++r) {
    fill_codes(format, problem.bank, r, in);
    fill_scales(format, problem.bank, r, in);
  }
  for (int64_t i = in.between(1, 5); i > 0; --i) {
    problem.rows.push_back(static_cast<int32_t>(in.between(std::max<int64_t>(0, rows - 5), rows - 1)));
  }
  for (int64_t t = in.between(1, 8); t > 0; --t) append_activations(problem, in, problem.x);
  const int64_t before = total().failures;
  check(problem);
  return total().failures == before;
}

}  // namespace
}  // namespace matrix

#if defined(CPU_MOE_LIBFUZZER)

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const bool chosen = matrix::choose_tiers("");
  if (!chosen || !matrix::try_input(data, size)) std::abort();  // libFuzzer keeps the input
  return 0;
}

#else

namespace matrix {
namespace {

// A tier whose results are off by a part in 4096, to see that this is found.
template <int Index>
void dot_broken(const cpu_moe::Weight& w, int64_t expert, const int32_t* rows, int64_t row_count,
                const uint8_t* const* planes, int64_t count, float* out, int64_t out_stride) {
  g_tiers[0].kernels.formats[Index].dot(w, expert, rows, row_count, planes, count, out, out_stride);
  for (int64_t p = 0; p < count; ++p) out[p * out_stride] *= 1 + 0x1p-12f;
}

template <size_t... Index>
void add_broken_tier(std::index_sequence<Index...>) {
  static cpu_moe::FormatKernels formats[] = {g_tiers[0].kernels.formats[Index]...};
  ((formats[Index].dot = dot_broken<Index>), ...);
  RunningTier broken = {"broken", g_tiers[0].kernels};
  broken.kernels.formats = formats;
  g_tiers.push_back(broken);
}

int usage(const char* program) {
  std::fprintf(stderr,
               "usage: %s [--runs N] [--seed N] [--tier NAME] [--broken] [FILE...]\n"
               "  --runs    so many random inputs (10000)\n"
               "  --seed    of the first of them (1); the next one's is the next number\n"
               "  --tier    this one (beside scalar, which it is compared with)\n"
               "  --broken  beside the others a tier that is wrong, to see that it is found\n"
               "  FILE      an input, instead of random ones\n",
               program);
  return 2;
}

int run(int argc, char** argv) {
  long runs = 10000, seed = 1;
  bool broken = false;
  std::string tier;
  std::vector<const char*> files;
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument == "--runs" && i + 1 < argc) {
      runs = std::atol(argv[++i]);
    } else if (argument == "--seed" && i + 1 < argc) {
      seed = std::atol(argv[++i]);
    } else if (argument == "--tier" && i + 1 < argc) {
      tier = argv[++i];
    } else if (argument == "--broken") {
      broken = true;
    } else if (argument.starts_with("-")) {
      return usage(argv[0]);
    } else {
      files.push_back(argv[i]);
    }
  }
  if (!choose_tiers(tier)) {
    std::fprintf(stderr, "no tier %s in this build\n", tier.c_str());
    return 2;
  }
  constexpr int kFormats = 8;
  if (std::size(cpu_moe::registry()) != kFormats) return 2;
  if (broken) add_broken_tier(std::make_index_sequence<kFormats>());
  catch_signals();
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  int64_t failed = 0, tried = 0;
  for (const char* file : files) {
    std::ifstream stream(file, std::ios::binary);
    const std::vector<char> data((std::istreambuf_iterator<char>(stream)), std::istreambuf_iterator<char>());
    ++tried;
    if (try_input(reinterpret_cast<const uint8_t*>(data.data()), data.size())) continue;
    std::printf("FAIL %s\n", file);
    ++failed;
  }
  for (long i = 0; files.empty() && i < runs; ++i) {
    Random random(static_cast<uint64_t>(seed + i));
    std::vector<uint8_t> data(static_cast<size_t>(random.below(600)));
    for (uint8_t& byte : data) byte = static_cast<uint8_t>(random.bits() >> 32);
    ++tried;
    if (try_input(data.data(), data.size())) continue;
    std::printf("FAIL --runs 1 --seed %ld\n", seed + i);
    ++failed;
  }
  print_tallies();
  const std::chrono::duration<double> seconds = Clock::now() - start;
  std::printf("kernel fuzzer: %lld inputs, %lld failed, %lld checks, %.1f s\n", static_cast<long long>(tried),
              static_cast<long long>(failed), static_cast<long long>(total().checks), seconds.count());
  return failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace matrix

int main(int argc, char** argv) { return matrix::run(argc, argv); }

#endif
