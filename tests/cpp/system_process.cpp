// The pool and its process: fork, environment, affinity, limits, more threads than cores.
#include <dlfcn.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <iostream>
#include <set>
#include <thread>

#include "../../csrc/system/affinity.h"
#include "../../csrc/system/info.h"
#include "../../csrc/system/topology.h"
#include "system_test.h"

#if defined(__linux__) && !SANITIZED
// Stands in front of libc's: fails after `threads_allowed` more threads, as RLIMIT_NPROC and pids.max make it.
static std::atomic<int> threads_allowed{1 << 30};
extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attr, void* (*start)(void*), void* arg) {
  using Create = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  static const auto create = reinterpret_cast<Create>(dlsym(RTLD_NEXT, "pthread_create"));
  if (threads_allowed.fetch_sub(1) <= 0) return EAGAIN;
  return create(thread, attr, start, arg);
}
#endif

namespace system_test {

// Runs `body` in a forked child that gives up after a minute.
static void in_child(const std::function<void()>& body) {
  std::fflush(nullptr);
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    alarm(60);
    try {
      body();
    } catch (const std::exception& e) {
      std::cerr << "in child: " << e.what() << std::endl;
      _exit(1);
    }
    _exit(0);
  }
  int status = 0;
  CHECK_EQ(waitpid(child, &status, 0), child);
  if (WIFSIGNALED(status)) fail(__func__, __LINE__, "child killed by signal " + std::to_string(WTERMSIG(status)));
  CHECK_EQ(WEXITSTATUS(status), 0);
}

void pool_fork() {
  if (!kForkedThreads) return;
  set_thread_count(3);
  check_job(0);
  in_child([] {
    CHECK(!pool_status().created);
    CHECK_EQ(thread_count(), 3);
    check_job(0);
    set_thread_count(2);
    check_job(0);
    in_child([] { check_job(0); });
    check_job(0);
  });
  check_job(0);
  // While other threads are inside jobs, and while they replace the pool.
  std::atomic<bool> stop{false};
  std::thread worker([&] {
    while (!stop) check_job(0);
  });
  std::thread changer([&] {
    for (int i = 0; !stop; ++i) {
      set_thread_count(2 + i % 2);
      check_job(0);
    }
  });
  for (int i = 0; i < (SANITIZED ? 5 : 25); ++i) {
    in_child([] {
      for (int k = 0; k < 3; ++k) check_job(0);
    });
  }
  stop = true;
  worker.join();
  changer.join();
  check_job(0);
}

void environment() {
  for (const char* bad : {"0", "-1", "two", "", "2.5", "4 ", "5000", "99999999999999999999"}) {
    in_child([&] {
      setenv("CPU_MOE_THREADS", bad, 1);
      // The parent's set_thread_count() came first there: a fresh process is what counts.
      execl("/proc/self/exe", "system_test", "--bad-environment", nullptr);
      CHECK(false);
    });
  }
  in_child([] {
    setenv("CPU_MOE_THREADS", "3", 1);
    execl("/proc/self/exe", "system_test", "--three", nullptr);
    CHECK(false);
  });
}

int bad_environment() {
  const std::string value = std::getenv("CPU_MOE_THREADS");
  for (int i = 0; i < 2; ++i) {
    for (const std::function<void()>& use :
         {std::function<void()>([] { thread_count(); }), std::function<void()>([] { run(0, [](Team&) {}); })}) {
      const std::string message = thrown<std::invalid_argument>(use);
      CHECK(message.find("CPU_MOE_THREADS=\"" + value + "\"") != std::string::npos);
      CHECK(message.find("integer from 1 to") != std::string::npos);
    }
  }
  CHECK(system_info_json().find("\"threads\": 0") != std::string::npos);
  set_thread_count(2);  // overrides it
  check_job(0);
  return 0;
}

int three_threads() {
  CHECK_EQ(thread_count(), 3);
  std::atomic<int> size{0};
  run(0, [&](Team& team) { size = team.size(); });
  CHECK_EQ(size.load(), 3);
  CHECK_EQ(pool_status().reason, "CPU_MOE_THREADS=3");
  return 0;
}

void pool_affinity() {
  const auto mask = thread_cpus();
  if (!mask) return;
  const int cores = static_cast<int>(read_topology().cores.size());
  for (const int n : {1, cores, cores + 1}) {
    set_thread_count(n);
    for (int i = 0; i < 50; ++i) check_job(0);
    CHECK_EQ(thread_cpus().value(), *mask);  // the caller is as it was
    const PoolStatus status = pool_status();
    CHECK_EQ(status.pinned, n <= cores);
    std::set<int> taken;
    for (const auto& worker : status.workers) {
      const Ints cpus = thread_cpus(worker.tid).value();
      CHECK_EQ(cpus, worker.cpus);
      CHECK(std::includes(mask->begin(), mask->end(), cpus.begin(), cpus.end()));
      if (status.pinned) {
        for (const int cpu : cpus) CHECK(taken.insert(cpu).second);
      }
    }
  }
  // A caller confined to a CPU after another finds the worker gone from there.
  set_thread_count(cores);
  check_job(0);  // creates the pool, under the whole mask
  if (cores > 1) {
    for (int i = 0; i < 3; ++i) {
      for (const int cpu : *mask) {
        CHECK_EQ(set_thread_cpus(0, Ints{cpu}), 0);
        run(0, [&](Team& team) {
          if (team.rank() == 0) return;
          const Ints cpus = thread_cpus().value();
          if (std::binary_search(cpus.begin(), cpus.end(), cpu))
            throw std::runtime_error("worker on the caller's core");
        });
        CHECK_EQ(set_thread_cpus(0, *mask), 0);
      }
    }
  }
  if (!kForkedThreads) return;
  // Made by a thread that has one CPU: the workers stay inside that.
  for (const int cpu : *mask) {
    in_child([&] {
      CHECK_EQ(set_thread_cpus(0, Ints{cpu}), 0);
      set_thread_count(3);
      check_job(0);
      for (const auto& worker : pool_status().workers) CHECK_EQ(thread_cpus(worker.tid).value(), Ints{cpu});
      CHECK_EQ(pool_status().pinned, false);
    });
  }
  // A thread that another library has pinned says so.
  if (mask->size() > 1) {
    in_child([&] {
      std::string error;
      std::thread([&] {
        try {
          CHECK_EQ(set_thread_cpus(0, Ints{mask->front()}), 0);
          set_thread_count(2);
          check_job(0);
          const auto warnings = pool_status().warnings;
          CHECK(std::any_of(warnings.begin(), warnings.end(),
                            [](const std::string& w) { return w.find("may run on 1 CPU only") != std::string::npos; }));
        } catch (const std::exception& e) {
          error = e.what();
        }
      }).join();
      CHECK_EQ(error, "");
    });
  }
}

void thread_limit() {
#if defined(__linux__) && !SANITIZED
  for (const int allowed : {0, 2}) {
    in_child([&] {
      threads_allowed = allowed;
      set_thread_count(6);
      check_job(0);
      CHECK_EQ(thread_count(), allowed + 1);
      for (int i = 0; i < 20; ++i) check_job(6);
      CHECK(pool_status().warnings.back().find("could be created") != std::string::npos);
      threads_allowed = 100;
      set_thread_count(6);  // asking again tries again
      check_job(0);
      CHECK_EQ(thread_count(), 6);
    });
  }
#endif
}

void oversubscription() {
  const int cpus = static_cast<int>(read_topology().allowed.size());
  const auto time = [](int n) {
    set_thread_count(n);
    check_job(0);
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < 300; ++i) check_job(0);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  const double fitting = time(cpus), four_times = time(4 * cpus);
  // Only the collapse is looked for (spinning for the rest of a scheduler's slice costs 1000 times): jobs this small
  // are nothing but switches between threads.
  if (four_times > 20 + 50 * fitting) fail(__func__, __LINE__, text(four_times) + " s, against " + text(fitting));
}

}  // namespace system_test
