#include "affinity.h"

#include <cerrno>

#if defined(__linux__)
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <memory>
#endif

namespace cpu_moe::sys {

#if defined(__linux__)

namespace {

struct FreeMask {
  void operator()(cpu_set_t* set) const { CPU_FREE(set); }
};
using Mask = std::unique_ptr<cpu_set_t, FreeMask>;

}  // namespace

long current_tid() { return syscall(SYS_gettid); }

int current_cpu() { return sched_getcpu(); }

std::optional<std::vector<int>> thread_cpus(long tid) {
  // The kernel answers EINVAL while the mask is smaller than its own, whose size it does not tell.
  for (int capacity = 1024; capacity <= (1 << 20); capacity *= 2) {
    const Mask mask(CPU_ALLOC(capacity));
    if (!mask) return std::nullopt;
    const size_t bytes = CPU_ALLOC_SIZE(capacity);
    CPU_ZERO_S(bytes, mask.get());
    if (sched_getaffinity(static_cast<pid_t>(tid), bytes, mask.get()) == 0) {
      std::vector<int> cpus;
      for (int cpu = 0; cpu < capacity; ++cpu) {
        if (CPU_ISSET_S(cpu, bytes, mask.get())) cpus.push_back(cpu);
      }
      if (cpus.empty()) return std::nullopt;
      return cpus;
    }
    if (errno != EINVAL) return std::nullopt;
  }
  return std::nullopt;
}

int set_thread_cpus(long tid, const std::vector<int>& cpus) {
  int capacity = 1024;
  for (const int cpu : cpus) {
    if (cpu < 0) return EINVAL;
    while (cpu >= capacity) capacity *= 2;
  }
  const Mask mask(CPU_ALLOC(capacity));
  if (!mask) return ENOMEM;
  const size_t bytes = CPU_ALLOC_SIZE(capacity);
  CPU_ZERO_S(bytes, mask.get());
  for (const int cpu : cpus) CPU_SET_S(cpu, bytes, mask.get());
  return sched_setaffinity(static_cast<pid_t>(tid), bytes, mask.get()) == 0 ? 0 : errno;
}

#else

long current_tid() { return 0; }
int current_cpu() { return -1; }
std::optional<std::vector<int>> thread_cpus(long) { return std::nullopt; }
int set_thread_cpus(long, const std::vector<int>&) { return ENOSYS; }

#endif

}  // namespace cpu_moe::sys
