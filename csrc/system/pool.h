// The process's one thread pool.
//
// Created at the first run(), persistent, never destroyed (safe at interpreter exit), re-created in a forked child at
// its first run(). Workers park on a futex after a short spin. They are pinned one per physical core inside the
// affinity mask that the creating thread has, when there are no more threads than cores; the calling threads are never
// touched.
#pragma once

#include <string>
#include <vector>

#include "barrier.h"
#include "function_ref.h"
#include "topology.h"

namespace cpu_moe::sys {

// One member's view of the team that runs a job.
class Team {
 public:
  int rank() const { return rank_; }  // 0 is the thread that called run()
  int size() const { return size_; }

  // Waits for all members; what they wrote before is visible after. If another member's body threw, this throws an
  // internal exception (no std::exception) that unwinds this member's body as well: let it pass.
  void barrier() {
    if (size_ > 1) barrier_->wait();
  }

 private:
  friend class Pool;
  friend class TeamOfOne;
  Team(int rank, int size, Barrier* barrier) : rank_(rank), size_(size), barrier_(barrier) {}

  int rank_;
  int size_;
  Barrier* barrier_;
};

// Runs body(team) once on each of `threads` threads, the caller being rank 0, and returns when all have left. 0 threads
// means all the pool has; more than it has are cut to that. Callers from several threads take turns. From inside a
// body, the nested job runs at once on the calling thread alone, as a team of one.
//
// Exceptions: one of those that left a body is rethrown here, after all members have left. std::invalid_argument for
// negative `threads` and for an invalid CPU_MOE_THREADS. A body must reach the same barriers on every rank, or throw.
//
// Floating point: bodies run with default modes (round to nearest, subnormals kept, exceptions masked) on every thread;
// the caller's modes and flags are restored. Does not allocate, unless it has to create the pool.
void run(int threads, FunctionRef<void(Team&)> body);

// The same, with prepare(size) called first, on the calling thread, with the size the team will have and while no other
// job runs: the place to size what is indexed by rank.
void run(int threads, FunctionRef<void(int)> prepare, FunctionRef<void(Team&)> body);

// How many threads the pool has, or would have if it were created now by this thread. Creates none.
// std::invalid_argument for an invalid CPU_MOE_THREADS.
int thread_count();

inline constexpr int kMaxThreads = 4096;  // a typo beyond it would exhaust the machine before it fails

// Overrides CPU_MOE_THREADS and the default from the next run() on, which rebuilds the pool.
// std::invalid_argument unless 1 <= n <= kMaxThreads.
void set_thread_count(int n);

// Says how the pool stands (for system_info_json()).
struct PoolStatus {
  struct Place {
    int rank;
    long tid;               // 0 where the system has no thread ids
    std::vector<int> cpus;  // what the worker may run on
  };
  bool created = false;
  int threads = 0;     // as thread_count(); 0 when CPU_MOE_THREADS is invalid
  std::string reason;  // why so many
  bool pinned = false;
  std::string pinning;         // why pinned or not; empty while there is no pool
  std::vector<Place> workers;  // without rank 0, which is whoever calls
  std::vector<std::string> warnings;
};
PoolStatus pool_status();

}  // namespace cpu_moe::sys
