// Introspection for status calls and `doctor`.
#pragma once

#include <string>

namespace cpu_moe::sys {

// A JSON object:
//   online_cpus, allowed_cpus  CPUs; allowed: by the calling thread's affinity mask
//   physical_cores   [[cpu, ...], ...]: the allowed cores, each with its allowed CPUs
//   quota            the cgroup CPU quota in CPUs, or null
//   cpuset           CPUs of the cgroup's cpuset, or null when nothing says
//   nodes            [{"id", "cpus", "online", "has_memory"}, ...]
//   caches           {"l1d", "l2", "l3"} in bytes, 0 when unknown
//   threads          what the pool has or would have; 0 when CPU_MOE_THREADS is invalid
//   threads_reason   why so many (or what is wrong with CPU_MOE_THREADS)
//   pool             {"created", "pinned", "pinning": why, or null without a pool,
//                     "workers": [{"rank", "tid", "cpus"}, ...]}: rank 0 is whichever thread calls, and not listed
//   warnings         ["...", ...]: all that were printed so far
// Creates no thread and changes nothing.
std::string system_info_json();

}  // namespace cpu_moe::sys
