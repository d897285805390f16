// Tests of csrc/system, without torch. Build together with csrc/system/*.cpp; exits 0 if all is well.
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <memory>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "../../csrc/system/affinity.h"
#include "../../csrc/system/cgroup.h"
#include "../../csrc/system/info.h"
#include "../../csrc/system/pool.h"
#include "../../csrc/system/read_file.h"
#include "../../csrc/system/topology.h"
#include "../../csrc/system/work.h"

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define SANITIZED 1
#else
#define SANITIZED 0
#endif

#if defined(__SANITIZE_THREAD__)
extern "C" const char* __tsan_default_options() { return "die_after_fork=0"; }
static constexpr bool kForkedThreads = false;  // it aborts when a child reuses the id of a parent's thread
#else
static constexpr bool kForkedThreads = true;
#endif

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

namespace {

using namespace cpu_moe::sys;
namespace fs = std::filesystem;

std::string text(const std::string& s) { return s; }
template <typename T>
std::string text(const T& value) {
  std::ostringstream out;
  out << value;
  return out.str();
}
template <typename T>
std::string text(const std::vector<T>& list) {
  std::string out = "[";
  for (const T& item : list) out += (out.size() > 1 ? " " : "") + text(item);
  return out + "]";
}
template <typename T>
std::string text(const std::optional<T>& value) {
  return value ? text(*value) : "none";
}

void fail(const char* where, int line, const std::string& message) {
  throw std::runtime_error(std::string(where) + ":" + std::to_string(line) + ": " + message);
}

#define CHECK(condition)                                                 \
  do {                                                                   \
    if (!(condition)) fail(__func__, __LINE__, "not true: " #condition); \
  } while (0)
#define CHECK_EQ(actual, expected)                                                                   \
  do {                                                                                               \
    const auto a_ = (actual);                                                                        \
    const decltype(a_) e_ = (expected);                                                              \
    if (!(a_ == e_)) fail(__func__, __LINE__, #actual " is " + text(a_) + ", expected " + text(e_)); \
  } while (0)

template <typename Error>
std::string thrown(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

using Ints = std::vector<int>;

// A directory with a /proc and /sys of its own.
class Tree {
 public:
  Tree() {
    std::string name = (fs::temp_directory_path() / "cpu_moe_test_XXXXXX").string();
    CHECK(mkdtemp(name.data()) != nullptr);
    root_ = name;
  }
  ~Tree() { fs::remove_all(root_); }
  const std::string& root() const { return root_; }

  Tree& file(const std::string& path, const std::string& content) {
    fs::create_directories(fs::path(root_ + path).parent_path());
    std::ofstream(root_ + path) << content << "\n";
    return *this;
  }
  Tree& cpu(int n, const std::string& siblings, const char* name = "core_cpus_list") {
    return file("/sys/devices/system/cpu/cpu" + std::to_string(n) + "/topology/" + name, siblings);
  }
  Tree& online(const std::string& list) { return file("/sys/devices/system/cpu/online", list); }
  Tree& cache(int cpu, int index, const std::string& level, const std::string& type, const std::string& size) {
    const std::string base =
        "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/cache/index" + std::to_string(index) + "/";
    return file(base + "level", level).file(base + "type", type).file(base + "size", size);
  }

 private:
  std::string root_;
};

std::vector<Ints> core_cpus(const Topology& t) {
  std::vector<Ints> cpus;
  for (const Core& core : t.cores) cpus.push_back(core.cpus);
  return cpus;
}

Ints range(int first, int last) {
  Ints cpus;
  for (int i = first; i <= last; ++i) cpus.push_back(i);
  return cpus;
}

void cpu_lists() {
  CHECK_EQ(parse_cpu_list("0-3,8,10-11").value(), (Ints{0, 1, 2, 3, 8, 10, 11}));
  CHECK_EQ(parse_cpu_list("8,0-1").value(), (Ints{0, 1, 8}));
  CHECK_EQ(parse_cpu_list("").value(), Ints{});
  for (const char* bad : {"x", "3-1", "-1", "0-", "0,,1", "0-99999999999", "1 2"}) CHECK(!parse_cpu_list(bad));
}

// Threads that the topology alone leads to.
int threads(const Topology& t) { return default_threads(t, std::nullopt).threads; }

void topology_smt() {  // 8 cores, 16 threads, numbered as Intel and AMD servers do: siblings are n and n + 8
  Tree tree;
  tree.online("0-15").cache(0, 0, "1", "Data", "48K").cache(0, 1, "1", "Instruction", "32K");
  tree.cache(0, 2, "2", "Unified", "2048K").cache(0, 3, "3", "Unified", "32M");
  for (int i = 0; i < 16; ++i) tree.cpu(i, std::to_string(i % 8) + "," + std::to_string(i % 8 + 8));
  const std::string node = "/sys/devices/system/node/";
  tree.file(node + "possible", "0-2").file(node + "online", "0-1").file(node + "has_memory", "0");
  tree.file(node + "node0/cpulist", "0-3,8-11").file(node + "node1/cpulist", "4-7,12-15");
  const Topology all = read_topology(tree.root(), range(0, 15));
  CHECK_EQ(threads(all), 8);
  CHECK_EQ(core_cpus(all)[3], (Ints{3, 11}));
  CHECK_EQ(all.cores[3].node, 0);
  CHECK_EQ(all.cores[4].node, 1);
  CHECK_EQ(all.nodes.size(), 2u);
  CHECK(all.nodes[0].has_memory && !all.nodes[1].has_memory && all.nodes[1].online);
  CHECK_EQ(all.nodes[1].cpus, (Ints{4, 5, 6, 7, 12, 13, 14, 15}));
  CHECK_EQ(all.caches.l1d, int64_t{48} << 10);
  CHECK_EQ(all.caches.l2, int64_t{2} << 20);
  CHECK_EQ(all.caches.l3, int64_t{32} << 20);
  CHECK_EQ(threads(read_topology(tree.root(), Ints{9, 1, 4})), 2);          // 1 and 9 are one core
  CHECK_EQ(threads(read_topology(tree.root(), Ints{8, 9, 10, 11})), 4);     // their siblings are in another cpuset
  CHECK_EQ(core_cpus(read_topology(tree.root(), Ints{8, 9}))[0], Ints{8});  // which must not be pinned to
  CHECK_EQ(read_topology(tree.root(), Ints{5, 40}).allowed, Ints{5});       // 40 is offline
  const ThreadDecision quota = default_threads(all, 3.99);
  CHECK_EQ(quota.threads, 3);
  CHECK_EQ(quota.reason, "8 physical cores within 16 allowed CPUs, limited by the cgroup quota of 3.99 CPUs");
  CHECK_EQ(default_threads(all, 0.5).threads, 1);
  CHECK_EQ(default_threads(all, 64.0).threads, 8);
  CHECK_EQ(default_threads(all, 64.0).reason, "8 physical cores within 16 allowed CPUs");
}

void topology_hybrid() {  // performance and efficiency cores, none with SMT
  Tree tree;
  tree.online("0-19");
  for (int i = 0; i < 20; ++i) tree.cpu(i, std::to_string(i), "thread_siblings_list");  // the name before Linux 5.2
  CHECK_EQ(threads(read_topology(tree.root(), range(0, 19))), 20);
}

void topology_container() {  // LXC: all 12 CPUs in sysfs, 2 in the mask
  Tree tree;
  tree.online("0-11");
  for (int i = 0; i < 12; ++i) tree.cpu(i, std::to_string(i / 2 * 2) + "-" + std::to_string(i / 2 * 2 + 1));
  const Topology t = read_topology(tree.root(), Ints{3, 7});
  CHECK_EQ(threads(t), 2);
  CHECK_EQ(t.online.size(), 12u);
  CHECK_EQ(t.nodes.size(), 1u);  // no NUMA files: one node with all of them
  CHECK_EQ(t.nodes[0].cpus.size(), 12u);
}

void topology_unreadable() {
  Tree tree;
  const Topology bare = read_topology(tree.root(), Ints{2, 5, 1500});
  CHECK_EQ(core_cpus(bare), (std::vector<Ints>{{2}, {5}, {1500}}));
  CHECK_EQ(bare.caches.l3, int64_t{0});
  tree.online("0-3").cpu(0, "garbage").cpu(1, "2-3").cpu(2, "").cpu(3, "3");  // 1 is not even its own sibling
  CHECK_EQ(threads(read_topology(tree.root(), Ints{0, 1, 2, 3})), 4);
  CHECK(!read_topology(tree.root(), Ints{}).allowed.empty());
  CHECK(!read_topology().allowed.empty());
}

void narrow_masks() {
  CHECK_EQ(narrow_mask_note(2, 8, 8), "");
  CHECK_EQ(narrow_mask_note(1, 1, 1), "");
  CHECK_EQ(narrow_mask_note(1, 0, 0), "");
  CHECK(narrow_mask_note(1, 8, 8).find("main thread may run on 8") != std::string::npos);
  CHECK(narrow_mask_note(1, 1, 4).find("cpuset has 4") != std::string::npos);
}

const char kMountV2[] = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate";

void quota_v2() {
  Tree tree;
  CHECK(!cgroup_cpu_quota(tree.root()));
  tree.file("/proc/self/cgroup", "0::/a/b/c").file("/proc/self/mountinfo", kMountV2);
  CHECK(!cgroup_cpu_quota(tree.root()));
  const std::string cgroup = "/sys/fs/cgroup";
  tree.file(cgroup + "/a/b/c/cpu.max", "max 100000");
  CHECK(!cgroup_cpu_quota(tree.root()));
  tree.file(cgroup + "/a/b/c/cpu.max", "50000 100000");
  CHECK_EQ(cgroup_cpu_quota(tree.root()), std::optional(0.5));
  tree.file(cgroup + "/a/b/c/cpu.max", "399000 100000").file(cgroup + "/a/b/cpu.max", "max 100000");
  CHECK_EQ(cgroup_cpu_quota(tree.root()), std::optional(3.99));
  tree.file(cgroup + "/a/cpu.max", "100000 50000");  // an ancestor's limit holds for all below it
  CHECK_EQ(cgroup_cpu_quota(tree.root()), std::optional(2.0));
  for (const char* bad : {"", "x 100000", "100 0", "-5 100000", "100 y"}) tree.file(cgroup + "/a/cpu.max", bad);
  CHECK_EQ(cgroup_cpu_quota(tree.root()), std::optional(3.99));
  tree.file(cgroup + "/a/cpuset.cpus.effective", "0-3,7");
  CHECK_EQ(cgroup_cpuset(tree.root()).value(), (Ints{0, 1, 2, 3, 7}));
}

void quota_v2_container() {
  const std::string host = "/docker/0123";  // the host's cgroup namespace, but only the container's subtree mounted
  Tree tree;
  tree.file("/proc/self/cgroup", "0::" + host + "/inner");
  tree.file("/proc/self/mountinfo", "30 23 0:26 " + host + " /sys/fs/c\\040g ro - cgroup2 cgroup rw");
  tree.file("/sys/fs/c g/cpu.max", "200000 100000");
  CHECK_EQ(cgroup_cpu_quota(tree.root()), std::optional(2.0));
  tree.file("/sys/fs/c g/inner/cpu.max", "150000 100000");
  CHECK_EQ(cgroup_cpu_quota(tree.root()), std::optional(1.5));
  for (const char* elsewhere : {"0::/docker/01234", "0::/../other", "0::/"}) {
    tree.file("/proc/self/cgroup", elsewhere);
    CHECK_EQ(cgroup_cpu_quota(tree.root()), std::optional(2.0));
  }
}

void quota_v1() {
  Tree tree;
  tree.file("/proc/self/cgroup", "9:name=systemd:/\n3:cpuset:/box\n2:cpu,cpuacct:/box/job\n0::/");
  tree.file("/proc/self/mountinfo",
            "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n"
            "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
            "34 31 0:31 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n"
            "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw");
  const std::string cpu = "/sys/fs/cgroup/cpu,cpuacct";
  tree.file(cpu + "/cpu.cfs_quota_us", "-1").file(cpu + "/cpu.cfs_period_us", "100000");
  tree.file(cpu + "/box/job/cpu.cfs_quota_us", "-1").file(cpu + "/box/job/cpu.cfs_period_us", "100000");
  CHECK(!cgroup_cpu_quota(tree.root()));
  tree.file(cpu + "/box/cpu.cfs_quota_us", "75000").file(cpu + "/box/cpu.cfs_period_us", "50000");
  CHECK_EQ(cgroup_cpu_quota(tree.root()), std::optional(1.5));
  tree.file(cpu + "/box/job/cpu.cfs_quota_us", "50000");
  CHECK_EQ(cgroup_cpu_quota(tree.root()), std::optional(0.5));
  tree.file("/sys/fs/cgroup/cpuset/box/cpuset.cpus", "4-5");
  CHECK_EQ(cgroup_cpuset(tree.root()).value(), (Ints{4, 5}));
  fs::remove(tree.root() + "/proc/self/mountinfo");  // then where everybody mounts them
  CHECK_EQ(cgroup_cpu_quota(tree.root()), std::optional(0.5));
}

void affinity() {
  CHECK(set_thread_cpus(0, Ints{-1}) != 0);
  CHECK(set_thread_cpus(0, Ints{70000}) != 0);
  if (const auto cpus = thread_cpus()) {
    CHECK_EQ(set_thread_cpus(0, *cpus), 0);
    CHECK_EQ(thread_cpus().value(), *cpus);
    CHECK(std::binary_search(cpus->begin(), cpus->end(), current_cpu()));
  }
}

void work_ranges() {
  WorkRanges work;
  int64_t item = -1;
  CHECK(!work.next(0, item));
  for (const int64_t n : {0, 1, 7, 64, 1000}) {
    for (const int size : {1, 2, 3, 64}) {
      for (const int ranks : {1, size, size + 2}) {  // fewer and more ranks than ranges
        work.reset(n, size);
        std::vector<int> seen(static_cast<size_t>(n));
        for (bool any = true; any;) {
          any = false;
          for (int r = 0; r < ranks; ++r) {
            const int64_t likely = work.peek_next(r);
            if (!work.next(r, item)) continue;
            CHECK(item >= 0 && item < n);
            CHECK(likely == -1 || likely == item);
            ++seen[static_cast<size_t>(item)];
            any = true;
          }
        }
        CHECK_EQ(std::count(seen.begin(), seen.end(), 1), static_cast<std::ptrdiff_t>(n));
        for (int i = 0; i < 3; ++i) CHECK(!work.next(ranks - 1, item));  // stays empty
      }
    }
  }
  work.reset(10, 2);
  CHECK(work.next(0, item) && item == 0);
  CHECK_EQ(work.peek_next(0), int64_t{1});
  for (int i = 0; i < 6; ++i) CHECK(work.next(1, item));  // 5 .. 9, then one from the far end of the other range
  CHECK_EQ(item, int64_t{4});
  CHECK_EQ(work.peek_next(0), int64_t{1});
  CHECK(!thrown<std::invalid_argument>([&] { work.reset(-1, 2); }).empty());
  CHECK(!thrown<std::invalid_argument>([&] { work.reset(1, 0); }).empty());
}

// One job that uses what the layers use: ranges, several phases, plain memory handed over by the barriers.
void check_job(int threads) {
  constexpr int kItems = 200;
  WorkRanges first, second;
  first.reset(kItems, std::max(threads, 1));
  second.reset(kItems, std::max(threads, 1));
  std::vector<int> a(kItems), b(kItems);
  std::vector<int> ranks;
  run(
      threads, [&](int size) { ranks.resize(static_cast<size_t>(size)); },
      [&](Team& team) {
        ++ranks[static_cast<size_t>(team.rank())];
        int64_t i;
        while (first.next(team.rank(), i)) a[static_cast<size_t>(i)] = static_cast<int>(i) + 1;
        team.barrier();
        while (second.next(team.rank(), i)) b[static_cast<size_t>(i)] = a[static_cast<size_t>(kItems - 1 - i)];
        team.barrier();
      });
  for (int i = 0; i < kItems; ++i) CHECK_EQ(b[static_cast<size_t>(i)], kItems - i);
  for (const int visits : ranks) CHECK_EQ(visits, 1);
}

void pool_is_lazy() {
  CHECK(!pool_status().created);
  CHECK(thread_count() >= 1);
  CHECK(!pool_status().created);
  CHECK(system_info_json().find("\"created\": false") != std::string::npos);
  run(0, [](Team&) {});
  CHECK(pool_status().created);
  CHECK(system_info_json().find("\"created\": true") != std::string::npos);
  CHECK(!thrown<std::invalid_argument>([] { run(-1, [](Team&) {}); }).empty());
  CHECK(!thrown<std::invalid_argument>([] { set_thread_count(0); }).empty());
  CHECK(!thrown<std::invalid_argument>([] { set_thread_count(kMaxThreads + 1); }).empty());
}

void pool_sizes() {
  for (const int n : {1, 2, 3, 5, 8, 16, 33, 64, 4, 1}) {
    set_thread_count(n);
    CHECK_EQ(thread_count(), n);
    std::atomic<int> size{0};
    run(0, [&](Team& team) { size = team.size(); });
    CHECK_EQ(size.load(), n);
    CHECK_EQ(static_cast<int>(pool_status().workers.size()), n - 1);
    for (int i = 0; i < 20; ++i) check_job(0);
    for (int t = 1; t <= n + 1; ++t) check_job(t);  // part of the pool, and more than it has
  }
  // Workers that sleep through jobs not meant for them still get the next one.
  set_thread_count(4);
  for (int round = 0; round < 5; ++round) {
    check_job(4);
    for (int i = 0; i < 200; ++i) check_job(2);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    check_job(4);
  }
}

void pool_barriers() {
  for (const int n : {2, 3, 8}) {
    set_thread_count(n);
    constexpr int kRounds = 2000;
    std::vector<int> value(static_cast<size_t>(n));
    std::atomic<int> wrong{0};
    run(0, [&](Team& team) {
      for (int i = 1; i <= kRounds; ++i) {
        value[static_cast<size_t>(team.rank())] = i;
        team.barrier();
        for (const int v : value) wrong += v != i;
        team.barrier();
      }
    });
    CHECK_EQ(wrong.load(), 0);
  }
}

void pool_exceptions() {
  for (const int n : {1, 2, 4}) {
    set_thread_count(n);
    for (int thrower = 0; thrower < n; ++thrower) {
      for (int i = 0; i < 10; ++i) {
        std::atomic<int> left{0};
        const std::string what = thrown<std::runtime_error>([&] {
          run(0, [&](Team& team) {
            struct Count {
              std::atomic<int>& n;
              ~Count() { ++n; }
            } count{left};
            team.barrier();
            if (team.rank() == thrower) throw std::runtime_error("from " + std::to_string(team.rank()));
            team.barrier();
            team.barrier();
          });
        });
        CHECK_EQ(what, "from " + std::to_string(thrower));
        CHECK_EQ(left.load(), n);  // nobody was still inside
        check_job(0);              // and the pool works on
      }
    }
    // All at once: one of them arrives.
    CHECK_EQ(thrown<std::logic_error>([] { run(0, [](Team&) { throw std::logic_error("each"); }); }), "each");
    CHECK_EQ(thrown<std::logic_error>([] { run(0, [](int) { throw std::logic_error("early"); }, [](Team&) {}); }),
             "early");
    check_job(0);
  }
}

void pool_nested() {
  set_thread_count(3);
  std::atomic<int> inner{0};
  run(0, [&](Team& team) {
    team.barrier();
    run(0, [&](Team& alone) {
      alone.barrier();
      inner += alone.size() == 1 && alone.rank() == 0;
    });
    team.barrier();
  });
  CHECK_EQ(inner.load(), 3);
}

void pool_callers() {
  set_thread_count(3);
  std::atomic<int> running{0}, overlaps{0};
  std::atomic<bool> stop{false};
  std::vector<std::string> errors(4);
  std::vector<std::thread> callers;
  for (size_t c = 0; c < errors.size(); ++c) {
    callers.emplace_back([&, c] {
      try {
        for (int i = 0; i < 200; ++i) {
          check_job(static_cast<int>(c));
          run(2, [&](Team& team) {
            if (team.rank() == 0) overlaps += running.fetch_add(1);
            team.barrier();
            if (team.rank() == 0) --running;
          });
        }
      } catch (const std::exception& e) {
        errors[c] = e.what();
      }
    });
  }
  std::thread changer([&] {  // resizing and looking meanwhile
    for (int i = 0; !stop; ++i) {
      set_thread_count(1 + i % 5);
      (void)thread_count();
      (void)system_info_json();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
  for (auto& caller : callers) caller.join();
  stop = true;
  changer.join();
  for (const auto& error : errors) CHECK_EQ(error, "");
  CHECK_EQ(overlaps.load(), 0);
}

void pool_float_mode() {
#if defined(__SSE__)
  set_thread_count(3);
  const unsigned before = _mm_getcsr();
  const unsigned odd = 0x9FC0 | 0x2000;  // flush to zero, denormals are zero, round down
  _mm_setcsr(odd);
  std::vector<unsigned> seen(3);
  run(0, [&](Team& team) {
    seen[static_cast<size_t>(team.rank())] = _mm_getcsr();
    _mm_setcsr(0x3F80);  // must not outlive the job
  });
  const unsigned after = _mm_getcsr();
  std::vector<unsigned> again(3);
  run(0, [&](Team& team) { again[static_cast<size_t>(team.rank())] = _mm_getcsr(); });
  _mm_setcsr(before);
  CHECK_EQ(after, odd);
  CHECK_EQ(seen, (std::vector<unsigned>(3, 0x1F80)));
  CHECK_EQ(again, (std::vector<unsigned>(3, 0x1F80)));
#endif
}

void pool_signals() {
  set_thread_count(3);
  std::atomic<int> right{0};
  run(0, [&](Team& team) {
    sigset_t blocked;
    pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
    const bool worker = team.rank() != 0;
    right += (sigismember(&blocked, SIGINT) != 0) == worker && (sigismember(&blocked, SIGTERM) != 0) == worker &&
             sigismember(&blocked, SIGSEGV) == 0;
  });
  CHECK_EQ(right.load(), 3);
}

void pool_idles() {
  for (const int n : {2, 8}) {
    set_thread_count(n);
    check_job(0);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    const auto cpu_seconds = [] {
      timespec t;
      clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
      return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
    };
    const double before = cpu_seconds();
    std::this_thread::sleep_for(std::chrono::milliseconds(400));
    const double used = cpu_seconds() - before;
    if (used > (SANITIZED ? 0.04 : 0.004))
      fail(__func__, __LINE__, "idle pool used " + text(used) + " s of CPU in 0.4 s");
  }
}

// Runs `body` in a forked child that gives up after a minute.
void in_child(const std::function<void()>& body) {
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
