#include "kernel_report.h"

#include <signal.h>
#include <unistd.h>

#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <map>
#include <utility>

namespace matrix {

std::string g_emulator;

namespace {

std::map<std::pair<std::string, std::string>, Total> g_tallies;  // of (tier, what)
Total* g_tally = nullptr;                                        // what is being checked now

// In static storage: a signal's handler prints it.
char g_running[512];

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

}  // namespace

std::string text(const char* format, ...) {
  char buffer[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(buffer, sizeof buffer, format, arguments);
  va_end(arguments);
  return buffer;
}

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

void expect(double got, double want, double bound, const std::string& what) {
  const bool fine = std::isnan(want)   ? std::isnan(got)
                    : std::isinf(want) ? got == want
                                       : std::fabs(got - want) <= bound;
  if (failed(fine)) fail(text("%s: got %.9g, expected %.9g +- %.3g", what.c_str(), got, want, bound));
}

void catch_signals() {
  for (const int number : {SIGSEGV, SIGBUS, SIGILL, SIGFPE}) signal(number, on_signal);
}

std::string emulation([[maybe_unused]] std::string_view tier) {
  std::string by = g_emulator;
#if defined(CPU_MOE_EMULATED)
  if (tier != "scalar" && tier != "neon") by = by.empty() ? "SIMDe" : "SIMDe on " + by;
#endif
  return by.empty() ? "" : "emulated by " + by;
}

Total total() {
  Total all;
  for (const auto& [key, tally] : g_tallies) {
    all.checks += tally.checks;
    all.failures += tally.failures;
  }
  return all;
}

void print_tallies() {
  for (const auto& [key, tally] : g_tallies) {
    std::printf("%s %-12s %-14s %9lld checks", tally.failures != 0 ? "FAIL" : "ok  ", key.first.c_str(),
                key.second.c_str(), static_cast<long long>(tally.checks));
    if (tally.failures != 0) std::printf(", %lld failed", static_cast<long long>(tally.failures));
    const std::string by = emulation(key.first);
    if (!by.empty()) std::printf(", %s", by.c_str());
    std::printf("\n");
  }
}

}  // namespace matrix
