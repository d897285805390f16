// Which CPUs a thread may run on. Off Linux nothing is known and nothing can be set.
#pragma once

#include <optional>
#include <vector>

namespace cpu_moe::sys {

// The id of the calling thread, or 0 where there is none.
long current_tid();

// The CPU the calling thread runs on just now, or -1.
int current_cpu();

// CPUs thread `tid` (0: the calling one) may run on, ascending; nullopt when the system does not say. Any number of
// CPUs.
std::optional<std::vector<int>> thread_cpus(long tid = 0);

// Confines thread `tid` (0: the calling one) to `cpus`. Returns 0 or an errno value (EINVAL: none of them is in the
// cpuset; EPERM; ENOSYS: not on this system). Never throws anything but std::bad_alloc.
int set_thread_cpus(long tid, const std::vector<int>& cpus);

}  // namespace cpu_moe::sys
