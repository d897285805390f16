#include "pool.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <stdexcept>

#include "affinity.h"
#include "cgroup.h"
#include "float_mode.h"
#include "futex.h"
#include "read_file.h"

namespace cpu_moe::sys {
namespace {

using std::chrono::microseconds;

// A worker that has finished stays awake this long, so that the next layer of a model finds it running: a wake-up costs
// some 5 to 50 us of latency, and what lies between two layers (attention, norms) is of that order. After the first
// part it yields, so that other threads of the process (torch's own) get the core at once. Then it costs nothing.
constexpr SpinBudget kLinger{.pause = microseconds(20), .yield = microseconds(80)};

// Members reach a barrier within about one work item of each other, microseconds to tens of them. Longer means that one
// is not running: then the core is better given away.
constexpr SpinBudget kBarrierSpin{.pause = microseconds(50)};

// A parked team is woken as a tree, each member waking this many others before it starts: a wake-up costs the waker 1
// to 2 us, so that one thread waking 63 would be late itself.
constexpr int kWakeFan = 4;

thread_local bool inside_job = false;

// Where the workers may run, and how many may run at once.
struct Placement {
  Topology topology;
  std::optional<double> quota;

  static Placement read() { return {read_topology(), cgroup_cpu_quota()}; }

  // How many threads can really run at the same time.
  int parallelism() const {
    const int cpus = static_cast<int>(topology.allowed.size());
    return quota ? std::clamp(static_cast<int>(std::ceil(std::min(*quota, 1e6))), 1, cpus) : cpus;
  }
};

// The physical cores, node by node in turn: a team smaller than the machine still uses every memory controller.
std::vector<Core> spread_over_nodes(const Topology& topology) {
  struct Keyed {
    int round;
    const Core* core;
  };
  std::vector<Keyed> keyed;
  for (const Core& core : topology.cores) {
    const auto same_node = [&](const Keyed& other) { return other.core->node == core.node; };
    keyed.push_back({static_cast<int>(std::count_if(keyed.begin(), keyed.end(), same_node)), &core});
  }
  std::stable_sort(keyed.begin(), keyed.end(), [](const Keyed& a, const Keyed& b) { return a.round < b.round; });
  std::vector<Core> cores;
  for (const Keyed& k : keyed) cores.push_back(*k.core);
  return cores;
}

std::string errno_text(int error) { return std::strerror(error); }

void name_this_thread(int rank) {
  const std::string name = "cpu_moe/" + std::to_string(rank);
#if defined(__linux__)
  pthread_setname_np(pthread_self(), name.c_str());
#elif defined(__APPLE__)
  pthread_setname_np(name.c_str());
#else
  (void)name;
#endif
}

// Signals belong to the host's threads. Those that a thread raises by its own fault stay, so that crash handlers
// (Python's faulthandler) can report them.
class BlockSignals {
 public:
  BlockSignals() {
    sigset_t set;
    sigfillset(&set);
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS}) sigdelset(&set, fault);
    pthread_sigmask(SIG_SETMASK, &set, &saved_);
  }
  ~BlockSignals() { pthread_sigmask(SIG_SETMASK, &saved_, nullptr); }

 private:
  sigset_t saved_;
};

void warn(const std::string& key, const std::string& message);

}  // namespace

class Pool {
 public:
  Pool(int threads, std::string reason, const Placement& placement)
      : reason_(std::move(reason)), inherited_(placement.topology.allowed), parallelism_(placement.parallelism()) {
    try {
      start_workers(threads);
      pin(placement.topology);
    } catch (...) {  // std::bad_alloc
      stop_workers();
      throw;
    }
  }

  ~Pool() { stop_workers(); }

  int size() const { return size_; }
  const std::vector<int>& inherited() const { return inherited_; }

  // The caller holds State::run.
  void run(int threads, FunctionRef<void(Team&)> body);

  // The caller holds State::config.
  void describe(PoolStatus& status) const {
    status.created = true;
    status.threads = size_;
    status.reason = reason_;
    status.pinned = pinned_;
    status.pinning = pinning_;
    for (int r = 1; r < size_; ++r) {
      const Worker& w = workers_[r];
      status.workers.push_back({r, w.tid, pinned_ ? cores_[static_cast<size_t>(w.core)].cpus : inherited_});
    }
  }

 private:
  struct alignas(kCacheLine) Worker {
    std::atomic<uint32_t> parked{0};  // 1: asleep, or about to be
    Pool* pool = nullptr;
    int rank = 0;
    int core = -1;  // index in cores_ while pinned
    long tid = 0;
    pthread_t thread{};
  };

  // job_ = epoch << kThreadBits | threads. 48 bits of epoch do not come round, so a worker that slept through any
  // number of jobs that were not for it cannot mistake a new one for its last.
  static constexpr int kThreadBits = 16;
  static constexpr uint64_t kThreadMask = (uint64_t{1} << kThreadBits) - 1;
  static constexpr uint64_t kStop = kThreadMask;  // larger than every rank: meant for all
  static_assert(kMaxThreads < static_cast<int>(kStop));

  static constexpr uint32_t kCallerSleeps = uint32_t{1} << 31;

  void start_workers(int threads);
  void stop_workers();
  void pin(const Topology& topology);
  void unpin(int error);
  void make_way(int threads);
  static void* thread_main(void* worker);
  void work(Worker& w);
  void execute(int rank, int threads);
  void unpark(Worker& w);
  void unpark_children(int rank, int threads);
  void leave();
  void wait_for_workers();

  std::string reason_;
  std::vector<int> inherited_;
  int parallelism_;
  int size_ = 1;
  std::unique_ptr<Worker[]> workers_;  // [1, size_); rank 0 is the caller

  // Pinning. The core `spare_` has no worker: it is left to the caller, which floats.
  bool pinned_ = false;
  std::string pinning_;
  std::vector<Core> cores_;       // one for each rank, in no order
  std::vector<int> core_of_cpu_;  // CPU -> index in cores_, or -1
  std::vector<int> owner_;        // index in cores_ -> rank, or 0
  int spare_ = 0;

  SpinBudget linger_;
  uint64_t epoch_ = 0;
  const FunctionRef<void(Team&)>* body_ = nullptr;
  std::exception_ptr error_;
  std::atomic<bool> failed_{false};
  Barrier barrier_;
  alignas(kCacheLine) std::atomic<uint64_t> job_{0};
  alignas(kCacheLine) std::atomic<uint32_t> pending_{0};  // workers that have not left the job, and kCallerSleeps
};

namespace {

// Everything that outlives a pool. Never destroyed. Lock order: run, then config.
struct State {
  std::mutex run;     // held for a whole job
  std::mutex config;  // what is below, and creating and replacing the pool; held across fork()
  Pool* pool = nullptr;
  bool stale = false;  // the next run() replaces the pool
  std::optional<int> requested;
  std::vector<std::string> warned;    // keys
  std::vector<std::string> warnings;  // texts
};

void before_fork();
void after_fork_in_parent();
void after_fork_in_child();

State& state() {
  static State* const s = [] {
    auto* fresh = new State;
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
    return fresh;
  }();
  return *s;
}

// Not at first use, where another thread could fork in the middle of it.
[[maybe_unused]] State& at_load = state();

void before_fork() { state().config.lock(); }
void after_fork_in_parent() { state().config.unlock(); }

void after_fork_in_child() {
  // The parent's workers do not exist here, and whoever held `run` does not either. The old pool's memory is given up:
  // a job may have been in it.
  State& s = state();
  new (&s.run) std::mutex;
  new (&s.config) std::mutex;
  s.pool = nullptr;
  s.stale = false;
}

// One line on stderr per key and process. The caller holds State::config.
void warn(const std::string& key, const std::string& message) {
  State& s = state();
  if (std::find(s.warned.begin(), s.warned.end(), key) != s.warned.end()) return;
  s.warned.push_back(key);
  s.warnings.push_back(message);
  const std::string line = "cpu_moe: warning: " + message + "\n";
  // Not through stdio: a fork() elsewhere could find its lock held.
  [[maybe_unused]] const auto written = write(STDERR_FILENO, line.data(), line.size());
}

std::optional<int> threads_from_environment() {
  const char* text = std::getenv("CPU_MOE_THREADS");
  if (text == nullptr) return std::nullopt;
  const auto n = parse_int<int>(text);
  if (!n || *n < 1 || *n > kMaxThreads) {
    throw std::invalid_argument("CPU_MOE_THREADS=\"" + std::string(text) +
                                "\" is not valid: expected an integer from 1 to " + std::to_string(kMaxThreads) +
                                ", or no such variable for one thread per physical core");
  }
  return n;
}

struct Wanted {
  ThreadDecision decision;
  bool is_explicit;
};

// `placement` is asked for only when it decides. The caller holds State::config.
template <typename GetPlacement>
Wanted wanted_threads(const GetPlacement& placement) {
  if (const auto n = state().requested) return {{*n, "set_num_threads(" + std::to_string(*n) + ")"}, true};
  if (const auto n = threads_from_environment()) return {{*n, "CPU_MOE_THREADS=" + std::to_string(*n)}, true};
  const Placement& p = placement();
  return {default_threads(p.topology, p.quota), false};
}

void warn_about(const Wanted& wanted, const Placement& placement) {
  if (wanted.is_explicit && wanted.decision.threads > placement.parallelism()) {
    warn("oversubscribed", wanted.decision.reason + " asks for more threads than can run at once (" +
                               std::to_string(placement.topology.allowed.size()) + " allowed CPUs" +
                               (placement.quota ? ", cgroup quota " + std::to_string(*placement.quota) : "") +
                               "): expect it to be slower than " + std::to_string(placement.parallelism()));
  }
  const std::vector<int> none;
  const std::string note =
      narrow_mask_note(placement.topology.allowed.size(), thread_cpus(getpid()).value_or(none).size(),
                       cgroup_cpuset().value_or(none).size());
  // A mask of one CPU may well be wanted (taskset, an orchestrator). It goes to stderr when it looks like an accident.
  const bool accident = std::getenv("OMP_PROC_BIND") || std::getenv("GOMP_CPU_AFFINITY") ||
                        std::getenv("KMP_AFFINITY") || thread_cpus(getpid()).value_or(none).size() > 1;
  if (!note.empty() && accident) warn("narrow mask", note);
}

// The pool to run on. The caller holds State::run, not State::config.
Pool& ready_pool() {
  State& s = state();
  const std::lock_guard lock(s.config);
  if (s.pool == nullptr || s.stale) {
    const Placement placement = Placement::read();
    const Wanted wanted = wanted_threads([&]() -> const Placement& { return placement; });
    warn_about(wanted, placement);
    delete std::exchange(s.pool, nullptr);
    s.pool = new Pool(wanted.decision.threads, wanted.decision.reason, placement);
    s.stale = false;
  }
  return *s.pool;
}

}  // namespace

// Makes a team for threads that have no pool to share: a body's own nested job.
class TeamOfOne : public Team {
 public:
  TeamOfOne() : Team(0, 1, nullptr) {}
};

void Pool::start_workers(int threads) {
  workers_ = std::make_unique<Worker[]>(static_cast<size_t>(threads));
  linger_ = threads <= parallelism_ ? kLinger : SpinBudget{};
  pending_.store(static_cast<uint32_t>(threads - 1), std::memory_order_relaxed);
  int error = 0;
  {
    const BlockSignals block;  // inherited by the workers
    for (; size_ < threads; ++size_) {
      Worker& w = workers_[size_];
      w.pool = this;
      w.rank = size_;
      error = pthread_create(&w.thread, nullptr, thread_main, &w);
      if (error != 0) break;
    }
  }
  if (error != 0) {
    pending_.fetch_sub(static_cast<uint32_t>(threads - size_));
    warn("thread limit", "only " + std::to_string(size_) + " of " + std::to_string(threads) +
                             " threads could be created (" + errno_text(error) + ")");
    reason_ += ", of which " + std::to_string(size_) + " could be created";
  }
  wait_for_workers();  // for their thread ids
}

void Pool::stop_workers() {
  job_.store((++epoch_ << kThreadBits) | kStop);
  for (int r = 1; r < size_; ++r) unpark(workers_[r]);
  for (int r = 1; r < size_; ++r) pthread_join(workers_[r].thread, nullptr);
}

void Pool::pin(const Topology& topology) {
  const size_t count = static_cast<size_t>(size_);
  if (!thread_cpus()) {
    pinning_ = "not pinned: this system has no thread affinity";
    return;
  }
  if (count > topology.cores.size()) {
    pinning_ = "not pinned: " + std::to_string(count) + " threads on " + std::to_string(topology.cores.size()) +
               " physical cores";
    return;
  }
  cores_ = spread_over_nodes(topology);
  cores_.resize(count);
  core_of_cpu_.assign(static_cast<size_t>(inherited_.back()) + 1, -1);
  for (size_t c = 0; c < count; ++c) {
    for (const int cpu : cores_[c].cpus) core_of_cpu_[static_cast<size_t>(cpu)] = static_cast<int>(c);
  }
  const int here = current_cpu();
  spare_ = here >= 0 && here < static_cast<int>(core_of_cpu_.size())
               ? std::max(core_of_cpu_[static_cast<size_t>(here)], 0)
               : 0;
  owner_.assign(count, 0);
  pinned_ = true;
  pinning_ = "each worker pinned to a physical core; the calling thread is not, and has the remaining one";
  int core = 0;
  for (int r = 1; r < size_; ++r, ++core) {
    if (core == spare_) ++core;
    Worker& w = workers_[r];
    w.core = core;
    owner_[static_cast<size_t>(core)] = r;
    if (const int error = set_thread_cpus(w.tid, cores_[static_cast<size_t>(core)].cpus)) {
      unpin(error);
      return;
    }
  }
}

// The caller holds State::config.
void Pool::unpin(int error) {
  pinned_ = false;
  pinning_ = "not pinned: sched_setaffinity failed (" + errno_text(error) + ")";
  for (int r = 1; r < size_; ++r) set_thread_cpus(workers_[r].tid, inherited_);
  warn("pinning", "worker threads are not pinned: sched_setaffinity failed (" + errno_text(error) + ")");
}

// If the caller has come to sit on a worker's core, that worker gets the core without one. Costs a system call (and an
// allocation), but only after the caller has migrated, or when callers take turns.
void Pool::make_way(int threads) {
  if (!pinned_) return;
  const int cpu = current_cpu();
  if (cpu < 0 || cpu >= static_cast<int>(core_of_cpu_.size())) return;
  const int core = core_of_cpu_[static_cast<size_t>(cpu)];
  if (core < 0) return;
  const int rank = owner_[static_cast<size_t>(core)];
  if (rank == 0 || rank >= threads) return;
  const std::lock_guard lock(state().config);
  if (const int error = set_thread_cpus(workers_[rank].tid, cores_[static_cast<size_t>(spare_)].cpus)) {
    unpin(error);
    return;
  }
  workers_[rank].core = spare_;
  owner_[static_cast<size_t>(spare_)] = rank;
  owner_[static_cast<size_t>(core)] = 0;
  spare_ = core;
}

void* Pool::thread_main(void* argument) {
  Worker& w = *static_cast<Worker*>(argument);
  name_this_thread(w.rank);
  w.tid = current_tid();
  w.pool->leave();
  w.pool->work(w);
  return nullptr;
}

void Pool::work(Worker& w) {
  uint64_t seen = 0;
  for (;;) {
    uint64_t job = 0;
    const auto ready = [&] {
      job = job_.load();
      return job != seen && (job & kThreadMask) > static_cast<uint64_t>(w.rank);
    };
    if (!spin_until(linger_, ready)) {
      // parked is raised before job_ is read again; unpark() reads it after job_ was written: one side sees the other.
      for (;;) {
        w.parked.store(1);
        if (ready()) break;
        futex_wait(w.parked, 1);
        if (ready()) break;
      }
      w.parked.store(0, std::memory_order_relaxed);
    }
    seen = job;
    const uint64_t threads = job & kThreadMask;
    if (threads == kStop) return;
    unpark_children(w.rank, static_cast<int>(threads));
    execute(w.rank, static_cast<int>(threads));
    leave();
  }
}

void Pool::unpark(Worker& w) {
  if (w.parked.load() != 0 && w.parked.exchange(0) != 0) futex_wake_all(w.parked);
}

void Pool::unpark_children(int rank, int threads) {
  const int first = rank * kWakeFan + 1;
  for (int r = first; r < std::min(first + kWakeFan, threads); ++r) unpark(workers_[r]);
}

void Pool::leave() {
  // When it was the last, the caller may go on at once; the pool's memory stays at least until this thread is joined.
  if (pending_.fetch_sub(1) == (kCallerSleeps | 1)) futex_wake_all(pending_);
}

void Pool::wait_for_workers() {
  const SpinBudget budget = linger_.pause.count() ? kBarrierSpin : SpinBudget{};
  if (!spin_until(budget, [&] { return pending_.load(std::memory_order_acquire) == 0; })) {
    uint32_t left = pending_.fetch_or(kCallerSleeps) | kCallerSleeps;
    while (left != kCallerSleeps) {
      futex_wait(pending_, left);
      left = pending_.load();
    }
  }
}

void Pool::execute(int rank, int threads) {
  const DefaultFloatMode mode;
  const bool was_inside = std::exchange(inside_job, true);
  Team team(rank, threads, &barrier_);
  try {
    (*body_)(team);
  } catch (const Barrier::Poisoned&) {
  } catch (...) {
    if (!failed_.exchange(true)) error_ = std::current_exception();
    barrier_.poison();
  }
  inside_job = was_inside;
}

void Pool::run(int threads, FunctionRef<void(Team&)> body) {
  make_way(threads);
  barrier_.reset(threads, threads <= parallelism_ ? kBarrierSpin : SpinBudget{});
  body_ = &body;
  failed_.store(false, std::memory_order_relaxed);
  if (threads > 1) {
    pending_.store(static_cast<uint32_t>(threads - 1), std::memory_order_relaxed);
    job_.store((++epoch_ << kThreadBits) | static_cast<uint64_t>(threads));
    unpark_children(0, threads);
  }
  execute(0, threads);
  if (threads > 1) wait_for_workers();
  body_ = nullptr;
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

void run(int threads, FunctionRef<void(int)> prepare, FunctionRef<void(Team&)> body) {
  if (threads < 0) throw std::invalid_argument("run: expected a thread count >= 0, got " + std::to_string(threads));
  if (inside_job) {
    prepare(1);
    TeamOfOne team;
    body(team);
    return;
  }
  const std::lock_guard lock(state().run);
  Pool& pool = ready_pool();
  const int size = threads == 0 ? pool.size() : std::min(threads, pool.size());
  prepare(size);
  pool.run(size, body);
}

void run(int threads, FunctionRef<void(Team&)> body) {
  run(threads, [](int) {}, body);
}

int thread_count() {
  State& s = state();
  const std::lock_guard lock(s.config);
  if (s.pool != nullptr && !s.stale) return s.pool->size();
  std::optional<Placement> placement;
  return wanted_threads([&]() -> const Placement& { return placement.emplace(Placement::read()); }).decision.threads;
}

void set_thread_count(int n) {
  if (n < 1 || n > kMaxThreads) {
    throw std::invalid_argument("thread count: expected 1 to " + std::to_string(kMaxThreads) + ", got " +
                                std::to_string(n));
  }
  State& s = state();
  const std::lock_guard lock(s.config);
  s.requested = n;
  // The same count keeps the pool, unless this thread's mask has changed since: asking again is how to adopt the new
  // one.
  if (s.pool != nullptr)
    s.stale = s.pool->size() != n || thread_cpus().value_or(s.pool->inherited()) != s.pool->inherited();
}

PoolStatus pool_status() {
  State& s = state();
  const std::lock_guard lock(s.config);
  PoolStatus status;
  if (s.pool != nullptr && !s.stale) {
    s.pool->describe(status);
  } else {
    try {
      std::optional<Placement> placement;
      const auto wanted = wanted_threads([&]() -> const Placement& { return placement.emplace(Placement::read()); });
      status.threads = wanted.decision.threads;
      status.reason = wanted.decision.reason;
    } catch (const std::invalid_argument& e) {
      status.reason = e.what();
    }
  }
  status.warnings = s.warnings;
  return status;
}

}  // namespace cpu_moe::sys
