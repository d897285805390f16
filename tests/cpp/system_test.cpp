// Tests of csrc/system, without torch. Build together with csrc/system/*.cpp; exits 0 if all is well.
#include "system_test.h"

#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <iostream>

#if defined(__SANITIZE_THREAD__)
extern "C" const char* __tsan_default_options() { return "die_after_fork=0"; }
#endif

namespace {

using namespace system_test;

struct Test {
  const char* name;
  void (*run)();
};
#define TEST(name) {#name, name}
const Test kTests[] = {
    TEST(cpu_lists),          TEST(topology_smt),        TEST(topology_hybrid),
    TEST(topology_container), TEST(topology_unreadable), TEST(narrow_masks),
    TEST(quota_v2),           TEST(quota_v2_container),  TEST(quota_v1),
    TEST(affinity),           TEST(work_ranges),         TEST(pool_is_lazy),
    TEST(pool_sizes),         TEST(pool_barriers),       TEST(pool_exceptions),
    TEST(pool_nested),        TEST(pool_callers),        TEST(pool_float_mode),
    TEST(pool_signals),       TEST(pool_idles),          TEST(pool_fork),
    TEST(environment),        TEST(pool_affinity),       TEST(thread_limit),
    TEST(oversubscription),
};

}  // namespace

int main(int argc, char** argv) {
  const std::string argument = argc > 1 ? argv[1] : "";
  try {
    if (argument == "--bad-environment") return bad_environment();
    if (argument == "--three") return three_threads();
  } catch (const std::exception& e) {
    std::cerr << e.what() << std::endl;
    return 1;
  }
  unsetenv("CPU_MOE_THREADS");
  alarm(600);  // a hang fails
  int failures = 0;
  for (const Test& test : kTests) {
    if (!argument.empty() && argument != test.name) continue;
    const auto start = std::chrono::steady_clock::now();
    try {
      test.run();
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
      std::printf("ok %s (%.2f s)\n", test.name, took.count());
    } catch (const std::exception& e) {
      ++failures;
      std::printf("FAILED %s: %s\n", test.name, e.what());
    }
    std::fflush(stdout);
  }
  return failures == 0 ? 0 : 1;
}
