// Threads that the library creates leave the host's signals to the host's threads.
#pragma once

#include <pthread.h>
#include <signal.h>

namespace cpu_moe::sys {

// While it lives, threads created by the calling one inherit a mask that blocks every signal, except those that a
// thread raises by its own fault, so that crash handlers (Python's faulthandler) can report them.
class BlockSignals {
 public:
  BlockSignals() {
    sigset_t set;
    sigfillset(&set);
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS}) sigdelset(&set, fault);
    pthread_sigmask(SIG_SETMASK, &set, &saved_);
  }
  ~BlockSignals() { pthread_sigmask(SIG_SETMASK, &saved_, nullptr); }
  BlockSignals(const BlockSignals&) = delete;
  BlockSignals& operator=(const BlockSignals&) = delete;

 private:
  sigset_t saved_;
};

}  // namespace cpu_moe::sys
