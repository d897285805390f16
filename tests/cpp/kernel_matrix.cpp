// The kernel matrix: every compiled tier's kernels over formats, shapes and codes, against kernel_reference.h and
// against the scalar tier, without torch. tests/kernel_build.py builds it, with csrc/formats/*.cpp and csrc/simd/*.cpp;
// it exits 0 if all is well.
//
//   kernel_matrix.h       the cases, a file a subject
//   kernel_dot.h          one call of dot() and what is required of it
//   kernel_banks.h        the formats' weights, and where they lie
//   kernel_tokens.h       activations
//   kernel_reference.h    what must come out, in double
//   kernel_report.h       counts and failures
#include "kernel_matrix.h"

#include <chrono>
#include <cstdio>

#include "kernel_report.h"

namespace matrix {

bool g_quick = false;

namespace {

struct Options {
  std::string tier, format;  // empty: all
};

int usage(const char* program) {
  std::fprintf(stderr,
               "usage: %s [--quick] [--tier NAME] [--format NAME] [--emulator NAME] [--list]\n"
               "  --quick   fewer shapes and codes: for sanitizers and emulators\n"
               "  --tier    this one (beside scalar, which it is compared with)\n"
               "  --format  this one, and nothing that is element-wise\n"
               "  --emulator  what runs this program in place of a CPU, for the output to tell\n"
               "  --list    names the tiers that were compiled, best first, and which run here\n",
               program);
  return 2;
}

int run(const Options& options) {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  if (!choose_tiers(options.tier)) {
    std::fprintf(stderr, "no tier %s in this build\n", options.tier.c_str());
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
  bool known = options.format.empty();
  for (const Format& format : banks::kFormats) {
    if (!options.format.empty() && format.id() != options.format) continue;
    known = true;
    codes(format);
    scales(format);
    shapes(format);
    companies(format);
    activations(format);
    places(format);
  }
  if (!known) {
    std::fprintf(stderr, "no format %s\n", options.format.c_str());
    return 2;
  }
  if (options.format.empty()) {
    for (const RunningTier& tier : g_tiers) elementwise(tier);
  }
  print_tallies();
  const Total all = total();
  const std::chrono::duration<double> seconds = Clock::now() - start;
  const std::string by = emulation(g_tiers.back().name);
  std::printf("kernel matrix%s%s: %lld checks, %lld failed, %.1f s\n", g_quick ? " (quick)" : "",
              by.empty() ? "" : (" (" + by + ")").c_str(), static_cast<long long>(all.checks),
              static_cast<long long>(all.failures), seconds.count());
  return all.failures == 0 ? 0 : 1;
}

int run(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument == "--quick") {
      g_quick = true;
    } else if (argument == "--list") {
      for (const cpu_moe::Tier& tier : cpu_moe::compiled_tiers()) {
        const std::string by = emulation(tier.name);
        std::printf("%s%s%s\n", std::string(tier.name).c_str(), by.empty() ? "" : (" (" + by + ")").c_str(),
                    tier.supported() ? "" : " (not supported by this CPU)");
      }
      return 0;
    } else if (argument == "--tier" && i + 1 < argc) {
      options.tier = argv[++i];
    } else if (argument == "--format" && i + 1 < argc) {
      options.format = argv[++i];
    } else if (argument == "--emulator" && i + 1 < argc) {
      g_emulator = argv[++i];
    } else {
      return usage(argv[0]);
    }
  }
  catch_signals();
  return run(options);
}

}  // namespace
}  // namespace matrix

int main(int argc, char** argv) { return matrix::run(argc, argv); }
