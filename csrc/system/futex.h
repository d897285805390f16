// Waiting: a bounded spin, then the kernel.
#pragma once

#include <atomic>
#include <chrono>
#include <climits>
#include <cstddef>
#include <cstdint>

#if defined(__linux__)
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__unix__) || defined(__APPLE__)
#include <sched.h>
#endif

namespace cpu_moe::sys {

// Data of different threads is kept this far apart. Twice x86's line, because its spatial prefetcher fetches lines in
// pairs, and the line of Apple's cores.
inline constexpr std::size_t kCacheLine = 128;

// Sleeps while `word` is `expected`. May return early for no reason: call it in a loop.
inline void futex_wait(std::atomic<uint32_t>& word, uint32_t expected) {
#if defined(__linux__)
  static_assert(sizeof(word) == sizeof(uint32_t) && std::atomic<uint32_t>::is_always_lock_free);
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
#else
  word.wait(expected);
#endif
}

// At most so many of the sleepers; where that cannot be said, all of them.
inline void futex_wake(std::atomic<uint32_t>& word, int count) {
#if defined(__linux__)
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
#else
  (void)count;
  word.notify_all();
#endif
}

inline void futex_wake_all(std::atomic<uint32_t>& word) { futex_wake(word, INT_MAX); }

inline void cpu_pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");  // `yield` is a no-op on most cores; `isb` waits about as long as x86's pause
#endif
}

struct SpinBudget {
  std::chrono::nanoseconds pause{0};  // first: the core is kept
  std::chrono::nanoseconds yield{0};  // then: whoever else is runnable on this core goes first
};

// Returns whether `ready()` became true within the budget. It is tested at least once.
template <typename Ready>
bool spin_until(const SpinBudget& budget, Ready&& ready) {
  using Clock = std::chrono::steady_clock;
  constexpr int kPauses = 16;  // ~0.3 to 0.7 us between two looks at the clock, which costs ~30 ns itself
  if (ready()) return true;
  const auto total = budget.pause + budget.yield;
  if (total.count() == 0) return false;
  const auto start = Clock::now();
  for (;;) {
    for (int i = 0; i < kPauses; ++i) {
      cpu_pause();
      if (ready()) return true;
    }
    const auto waited = Clock::now() - start;
    if (waited >= total) return false;
#if defined(__unix__) || defined(__APPLE__)
    if (waited >= budget.pause) sched_yield();
#endif
  }
}

}  // namespace cpu_moe::sys
