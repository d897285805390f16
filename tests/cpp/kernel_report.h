// What the kernels' tests have found: counts of checks by tier and subject, failures as they come, and which program
// emulates the CPU.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace matrix {

std::string text(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Says what is being checked from now on; a failure, or a signal that ends the program, names it.
void begin(std::string_view tier, const std::string& what, const std::string& details);

// Counts a check and says whether it failed; the caller then tells how.
bool failed(bool fine);
void fail(const std::string& how);

// A NaN wants a NaN, an infinity itself.
void expect(double got, double want, double bound, const std::string& what);

// Signals that a wrong kernel may raise are failures, too.
void catch_signals();

// The program that runs this one on a CPU that is not there, if any; a build with the tiers' instructions emulated
// knows that by itself. What is printed of a tier says so: it is no native run.
extern std::string g_emulator;
std::string emulation(std::string_view tier);

struct Total {
  int64_t checks = 0, failures = 0;
};
Total total();
// A line for each tier and subject.
void print_tallies();

}  // namespace matrix
