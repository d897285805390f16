// The barrier between two phases of a job.
#pragma once

#include <atomic>
#include <cstdint>

#include "futex.h"

namespace cpu_moe::sys {

// Reusable (sense-reversing: the sense is a counter). A member that cannot go on calls poison(): everybody who waits or
// comes later leaves with Poisoned instead of waiting for ever.
class Barrier {
 public:
  struct Poisoned {};  // not a std::exception, so that no ordinary handler takes it for an error of its own

  // Only while nobody is inside.
  void reset(int size, const SpinBudget& budget) {
    size_ = static_cast<uint32_t>(size);
    budget_ = budget;
    arrived_.store(0, std::memory_order_relaxed);
    phase_.store(0, std::memory_order_relaxed);
  }

  // Everything written before it by any member is visible after it to all.
  void wait() {
    // The phase cannot end before this member has arrived, so this value is the one to wait out.
    const uint32_t phase = phase_.load(std::memory_order_acquire);
    if (phase & kPoison) throw Poisoned{};
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
      arrived_.store(0, std::memory_order_relaxed);  // released by the next line, before anyone can arrive again
      phase_.fetch_add(kStep);
      if (sleepers_.load() != 0) futex_wake_all(phase_);
      return;
    }
    if (!spin_until(budget_, [&] { return phase_.load(std::memory_order_acquire) != phase; })) {
      // sleepers_ is raised before the kernel compares phase_; phase_ is written before sleepers_ is read: one of the
      // two sides sees the other.
      sleepers_.fetch_add(1);
      while (phase_.load() == phase) futex_wait(phase_, phase);
      sleepers_.fetch_sub(1);
    }
    if (phase_.load(std::memory_order_acquire) & kPoison) throw Poisoned{};
  }

  void poison() {
    phase_.fetch_or(kPoison);
    futex_wake_all(phase_);
  }

 private:
  static constexpr uint32_t kPoison = 1;
  static constexpr uint32_t kStep = 2;

  alignas(kCacheLine) std::atomic<uint32_t> arrived_{0};
  alignas(kCacheLine) std::atomic<uint32_t> phase_{0};  // read by the spinning members: on a line without arrivals
  std::atomic<uint32_t> sleepers_{0};
  uint32_t size_ = 1;
  SpinBudget budget_;
};

}  // namespace cpu_moe::sys
