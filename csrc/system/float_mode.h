// The floating-point mode that jobs run under.
#pragma once

#include <cstdint>

#if defined(__SSE__) || defined(_M_X64)
#include <xmmintrin.h>
#endif

namespace cpu_moe::sys {

// While it lives, the thread has the default mode (round to nearest even, subnormals neither flushed nor read as zero,
// exceptions masked); then what it had before, status flags included. The mode is per thread: without this, results
// would depend on which thread computed them (torch.set_flush_denormal changes the calling thread only).
class DefaultFloatMode {
 public:
  DefaultFloatMode() : saved_(get()) { set(kDefault); }
  ~DefaultFloatMode() { set(saved_); }
  DefaultFloatMode(const DefaultFloatMode&) = delete;
  DefaultFloatMode& operator=(const DefaultFloatMode&) = delete;

 private:
#if defined(__SSE__) || defined(_M_X64)
  using Word = uint32_t;
  static constexpr Word kDefault = 0x1F80;  // MXCSR after reset
  static Word get() { return _mm_getcsr(); }
  static void set(Word word) { _mm_setcsr(word); }
#elif defined(__aarch64__)
  using Word = uint64_t;
  static constexpr Word kDefault = 0;  // FPCR
  static Word get() {
    Word word;
    asm volatile("mrs %0, fpcr" : "=r"(word)::"memory");
    return word;
  }
  static void set(Word word) { asm volatile("msr fpcr, %0" ::"r"(word) : "memory"); }
#else
  using Word = uint32_t;
  static constexpr Word kDefault = 0;
  static Word get() { return 0; }
  static void set(Word) {}
#endif

  Word saved_;
};

}  // namespace cpu_moe::sys
