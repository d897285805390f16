// Topology, masks, cgroup quotas and affinity, mostly on trees of files made up here.
#include <algorithm>
#include <iostream>

#include "../../csrc/system/affinity.h"
#include "../../csrc/system/cgroup.h"
#include "../../csrc/system/read_file.h"
#include "../../csrc/system/topology.h"
#include "system_test.h"

namespace system_test {

static std::vector<Ints> core_cpus(const Topology& t) {
  std::vector<Ints> cpus;
  for (const Core& core : t.cores) cpus.push_back(core.cpus);
  return cpus;
}

static Ints range(int first, int last) {
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
static int threads(const Topology& t) { return default_threads(t, std::nullopt).threads; }

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

}  // namespace system_test
