#include "torch_threads.h"

#include <ATen/Parallel.h>
#include <dlfcn.h>
#include <pthread.h>
#include <time.h>

#include <atomic>
#include <cstdlib>
#include <exception>
#include <stdexcept>
#include <string>
#include <string_view>

#include "../system/futex.h"
#include "../system/pool.h"

namespace cpu_moe::ops {
namespace {

bool wanted() {
  const char* text = std::getenv("CPU_MOE_OPENMP");
  if (text == nullptr || std::string_view(text) == "auto") return true;
  if (std::string_view(text) == "keep") return false;
  throw std::invalid_argument("CPU_MOE_OPENMP=\"" + std::string(text) + "\" is not valid: expected auto or keep");
}

#if AT_PARALLEL_OPENMP && defined(__linux__)

std::atomic<bool> forked{false};
[[maybe_unused]] const int fork_handler = pthread_atfork(nullptr, nullptr, [] { forked.store(true); });

// A thread's calls before the first that looks at its team. Looking starts the team where there is none yet, and a
// thread that calls us once or twice may have no use for one.
constexpr int kCallsBeforeTeam = 2;

constexpr int kWakeFan = 4;

// The OpenMP threads that work for the calling thread.
struct Team {
  int calls = 0;
  int threads = 0;  // when it was looked at; 0: not yet
  bool known = false;
  clockid_t clock{};  // of its last thread: the CPU time it has used
  int64_t used = 0;   // as the clock stood when the last job ended
};
thread_local Team team;

int64_t read(clockid_t clock) {
  timespec t{};
  return clock_gettime(clock, &t) == 0 ? int64_t{t.tv_sec} * 1000000000 + t.tv_nsec : -1;
}

// torch's OpenMP runtime. By name, and from what libtorch_cpu itself is linked with: a `#pragma omp` here would bind us
// to whatever runtime the compiler brings, which need not be the copy that torch brings.
struct OpenMp {
  void (*parallel)(void (*)(void*), void*, unsigned threads, unsigned flags) = nullptr;  // LLVM's has it as well
  int (*thread_number)() = nullptr;
  int (*thread_count)() = nullptr;

  static const OpenMp& of_torch() {
    static const OpenMp found = [] {
      OpenMp openmp;
      if (void* library = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD)) {
        openmp.parallel = reinterpret_cast<decltype(parallel)>(dlsym(library, "GOMP_parallel"));
        openmp.thread_number = reinterpret_cast<decltype(thread_number)>(dlsym(library, "omp_get_thread_num"));
        openmp.thread_count = reinterpret_cast<decltype(thread_count)>(dlsym(library, "omp_get_num_threads"));
        dlclose(library);
      }
      return openmp;
    }();
    return found;
  }
  bool there() const { return parallel != nullptr && thread_number != nullptr && thread_count != nullptr; }

  // body(number of the thread) on each of a team.
  template <class Body>
  void run(int threads, Body& body) const {
    struct Call {
      const OpenMp& openmp;
      Body& body;
    } call{*this, body};
    parallel(
        [](void* data) {
          Call& c = *static_cast<Call*>(data);
          c.body(c.openmp.thread_number());
        },
        &call, static_cast<unsigned>(threads), 0);
  }
};

void look_at_team(int threads) {
  team.threads = threads;
  team.known = false;
  Team& mine = team;
  const OpenMp& openmp = OpenMp::of_torch();
  auto look = [&mine, &openmp](int number) {
    const int granted = openmp.thread_count();  // may be fewer than asked for
    if (number != 0 && number == granted - 1) mine.known = pthread_getcpuclockid(pthread_self(), &mine.clock) == 0;
  };
  openmp.run(threads, look);
}

// The members other than the caller sleep until job() has ended.
void run_with_team_asleep(int threads, sys::FunctionRef<void()> job) {
  std::atomic<uint32_t> ended{0};
  std::exception_ptr error;  // must not leave the region
  auto body = [&](int number) {
    if (number == 0) {
      try {
        job();
      } catch (...) {
        error = std::current_exception();
      }
      ended.store(1);
    } else {
      while (ended.load() == 0) sys::futex_wait(ended, 0);
    }
    sys::futex_wake(ended, kWakeFan);  // one thread that wakes them all would take long
  };
  OpenMp::of_torch().run(threads, body);
  if (error) std::rethrow_exception(error);
}

void run(int threads, sys::FunctionRef<void()> job) {
  if (team.threads != threads) {
    if (team.calls++ < kCallsBeforeTeam) return job();
    look_at_team(threads);
  }
  if (!team.known) return job();
  // Since the last job it has worked for torch, or spun: so it probably spins now.
  if (read(team.clock) != team.used) {
    run_with_team_asleep(threads, job);
  } else {
    job();
  }
  team.used = read(team.clock);
  if (team.used < 0) team.threads = 0;  // the thread is gone
}

#endif

}  // namespace

void run_beside_torch(sys::FunctionRef<void()> job) {
  static const bool want = wanted();
#if AT_PARALLEL_OPENMP && defined(__linux__)
  const int threads = at::get_num_threads();
  if (want && threads > 1 && !forked.load() && !at::in_parallel_region() && sys::thread_count() > 1 &&
      OpenMp::of_torch().there()) {
    return run(threads, job);
  }
#endif
  (void)want;
  job();
}

}  // namespace cpu_moe::ops
