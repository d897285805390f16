// Which processors there are, which of them this process may use, and how many threads follow from that.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace cpu_moe::sys {

// A physical core that has at least one allowed CPU.
struct Core {
  std::vector<int> cpus;  // its allowed CPUs (SMT siblings), ascending
  int node = 0;
};

struct NumaNode {
  int id = 0;
  std::vector<int> cpus;  // all of them, allowed or not
  bool online = true;
  bool has_memory = true;
};

// Bytes, as the first allowed CPU sees them; 0: unknown.
struct CacheSizes {
  int64_t l1d = 0, l2 = 0, l3 = 0;
};

struct Topology {
  std::vector<int> online;      // CPUs, ascending
  std::vector<int> allowed;     // those the affinity mask leaves; never empty
  std::vector<Core> cores;      // by their first allowed CPU
  std::vector<NumaNode> nodes;  // by id; never empty
  CacheSizes caches;
};

// Reads Linux's sysfs below `root` (tests pass a tree of their own). `allowed`: the CPUs to reckon with, by default the
// calling thread's affinity mask. Never fails: a CPU without topology files is a core of its own, a system without NUMA
// files is one node. Other systems: what sysctl (macOS) or the C++ library know.
// Source: Linux Documentation/ABI/stable/sysfs-devices-system-cpu and -node.
Topology read_topology(const std::string& root = "", const std::optional<std::vector<int>>& allowed = std::nullopt);

struct ThreadDecision {
  int threads = 1;
  std::string reason;
};

// One thread per allowed physical core (a second SMT sibling adds nothing where memory is the limit; performance and
// efficiency cores both count, as work is handed out dynamically), but no more than the quota lets run: an exceeded
// quota stops all threads for the rest of every period. At least 1.
ThreadDecision default_threads(const Topology& topology, std::optional<double> quota);

// When a thread may use one CPU only although its process's main thread, or its cpuset, has more: a sentence that says
// so; else "". (OMP_PROC_BIND and its like pin the thread that loads an OpenMP runtime, and all that it starts.)
std::string narrow_mask_note(size_t thread_cpus, size_t main_thread_cpus, size_t cpuset_cpus);

}  // namespace cpu_moe::sys
