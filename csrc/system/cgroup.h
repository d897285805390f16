// What the control groups of this process (Linux, v1 and v2) let it use. `root` is put before /proc and /sys: tests
// pass a directory with a tree of their own.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace cpu_moe::sys {

// The CPU quota, in CPUs (1.5 = 150 ms per 100 ms): the least over the process's group and all its ancestors up to the
// mount point, as each of them limits all below it. nullopt: unlimited, or nothing readable.
// Source: Linux Documentation/admin-guide/cgroup-v2.rst (cpu.max), scheduler/sched-bwc.rst (cpu.cfs_quota_us).
std::optional<double> cgroup_cpu_quota(const std::string& root = "");

// The CPUs of the process's cpuset, from the nearest group that says; nullopt when none does.
std::optional<std::vector<int>> cgroup_cpuset(const std::string& root = "");

}  // namespace cpu_moe::sys
