#include "openmp.h"

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <stdexcept>
#include <string_view>
#include <vector>

#if defined(__linux__)
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>

#include "futex.h"
#include "signals.h"
#endif

namespace cpu_moe::sys {
namespace {

std::mutex mutex;
std::string status;                     // under mutex
bool done = false;                      // under mutex: libgomp has been shown more threads
std::atomic<uint64_t> answered_for{0};  // the two thread counts that status is about

#if defined(__linux__)

struct Libgomp {
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned);
  int (*cpus)();
};

// Every copy of libgomp in the process: packages bring their own (torch, scikit-learn).
std::vector<Libgomp> find_libgomp() {
  std::vector<std::string> paths;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* out) {
        const std::string_view path = info->dlpi_name ? info->dlpi_name : "";
        if (path.substr(path.rfind('/') + 1).starts_with("libgomp")) {
          static_cast<std::vector<std::string>*>(out)->emplace_back(path);
        }
        return 0;
      },
      &paths);
  std::vector<Libgomp> found;
  for (const std::string& path : paths) {
    // RTLD_NODELETE: the team lives in it.
    void* library = dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE);
    if (library == nullptr) continue;
    const Libgomp functions{reinterpret_cast<decltype(Libgomp::parallel)>(dlsym(library, "GOMP_parallel")),
                            reinterpret_cast<decltype(Libgomp::cpus)>(dlsym(library, "omp_get_num_procs"))};
    if (functions.parallel != nullptr && functions.cpus != nullptr) found.push_back(functions);
    dlclose(library);
  }
  return found;
}

// libgomp ends the process when it cannot create a thread (a limit on processes, a cgroup's pids.max): see first.
bool can_create(int threads) {
  static std::atomic<uint32_t> hold;
  hold.store(1);
  std::vector<pthread_t> created;
  const BlockSignals block;
  for (; static_cast<int>(created.size()) < threads;) {
    pthread_t thread;
    const auto wait = [](void*) -> void* {
      while (hold.load() != 0) futex_wait(hold, 1);
      return nullptr;
    };
    if (pthread_create(&thread, nullptr, wait, nullptr) != 0) break;
    created.push_back(thread);
  }
  hold.store(0);
  futex_wake_all(hold);
  for (const pthread_t thread : created) pthread_join(thread, nullptr);
  return static_cast<int>(created.size()) == threads;
}

struct Team {
  std::vector<Libgomp> libraries;
  unsigned size;
  std::atomic<uint32_t> running{0};
  std::atomic<uint32_t> never{0};
};

// A team belongs to the thread that started it, and stays counted as long as that thread lives.
void* hold_team(void* argument) {
  Team& team = *static_cast<Team*>(argument);
  pthread_setname_np(pthread_self(), "cpu_moe/openmp");  // and those it creates
  for (const Libgomp& library : team.libraries) library.parallel([](void*) {}, nullptr, team.size, 0);
  team.running.store(1);
  futex_wake_all(team.running);
  for (;;) futex_wait(team.never, 0);
}

bool start_team(std::vector<Libgomp> libraries, int extra) {
  const int threads = static_cast<int>(libraries.size()) * extra + 1;
  if (!can_create(threads)) return false;
  auto* team = new Team{std::move(libraries), static_cast<unsigned>(extra) + 1};  // for ever
  pthread_t thread;
  const BlockSignals block;
  if (pthread_create(&thread, nullptr, hold_team, team) != 0) {
    delete team;
    return false;
  }
  pthread_detach(thread);
  while (team->running.load() == 0) futex_wait(team->running, 0);
  return true;
}

std::string share(int openmp_threads, int pool_threads) {
  if (pool_threads < 2) return "left alone: the pool is one thread";
  for (const char* name : {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}) {
    if (std::getenv(name) != nullptr) return std::string("left alone: ") + name + " is set";
  }
  std::vector<Libgomp> libraries = find_libgomp();
  if (libraries.empty()) return "left alone: no libgomp in this process";
  const int cpus = libraries.front().cpus();
  const int extra = cpus + 1 - openmp_threads;  // what libgomp lacks to see more threads than CPUs
  const std::string counts = std::to_string(openmp_threads) + " OpenMP and " + std::to_string(pool_threads) +
                             " pool threads, one of them in both, on " + std::to_string(cpus) + " CPUs";
  if (extra <= 0) return "left alone: " + counts + ", which libgomp sees by itself";
  if (extra > pool_threads - 1) return "left alone: " + counts;
  if (!start_team(std::move(libraries), extra)) {
    return "not kept from spinning between operators: " + std::to_string(extra) + " more threads cannot be created";
  }
  done = true;
  return "kept from spinning between operators: " + counts;
}

#else

std::string share(int, int) { return "left alone: not on this system"; }

#endif

bool wanted() {
  const char* text = std::getenv("CPU_MOE_OPENMP");
  if (text == nullptr || std::string_view(text) == "auto") return true;
  if (std::string_view(text) == "keep") return false;
  throw std::invalid_argument("CPU_MOE_OPENMP=\"" + std::string(text) + "\" is not valid: expected auto or keep");
}

}  // namespace

void share_cores_with_openmp(int openmp_threads, int pool_threads) {
  const uint64_t counts = static_cast<uint64_t>(openmp_threads) << 32 | static_cast<uint32_t>(pool_threads);
  if (answered_for.load(std::memory_order_relaxed) == counts) return;
  // Another thread that is at it will do; and in a forked child the lock may be held for ever.
  const std::unique_lock lock(mutex, std::try_to_lock);
  if (!lock) return;
  if (!done) status = wanted() ? share(openmp_threads, pool_threads) : "left alone: CPU_MOE_OPENMP=keep";
  answered_for.store(counts, std::memory_order_relaxed);
}

std::string openmp_status() {
  const std::unique_lock lock(mutex, std::try_to_lock);
  return lock ? status : "";
}

}  // namespace cpu_moe::sys
