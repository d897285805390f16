#include "topology.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <numeric>
#include <thread>

#include "affinity.h"
#include "read_file.h"

#if defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(__linux__)
#include <unistd.h>
#endif

namespace cpu_moe::sys {
namespace {

std::vector<int> first_cpus(int n) {
  std::vector<int> cpus(static_cast<size_t>(std::max(n, 1)));
  std::iota(cpus.begin(), cpus.end(), 0);
  return cpus;
}

bool contains(const std::vector<int>& sorted, int value) {
  return std::binary_search(sorted.begin(), sorted.end(), value);
}

#if defined(__APPLE__)
int64_t sysctl_value(const char* name) {
  int64_t value = 0;  // little endian: right for 32-bit answers as well
  size_t bytes = sizeof(value);
  return sysctlbyname(name, &value, &bytes, nullptr, 0) == 0 ? value : 0;
}
#endif

// "32K", "1M", "36864K"
int64_t parse_size(const std::string& text) {
  const auto digits = text.find_first_not_of("0123456789");
  const auto value = parse_int<int64_t>(std::string_view(text).substr(0, digits));
  if (!value) return 0;
  const std::string unit = digits == text.npos ? "" : text.substr(digits);
  return unit == "K" ? *value << 10 : unit == "M" ? *value << 20 : unit == "G" ? *value << 30 : *value;
}

CacheSizes read_caches(const std::string& cpu_directory, [[maybe_unused]] bool real) {
  CacheSizes sizes;
  for (int i = 0;; ++i) {
    const std::string cache = cpu_directory + "/cache/index" + std::to_string(i);
    const auto level = read_file(cache + "/level");
    if (!level) break;
    const std::string type = read_file(cache + "/type").value_or("");
    const int64_t size = parse_size(read_file(cache + "/size").value_or(""));
    if (type == "Instruction") continue;
    if (*level == "1") sizes.l1d = size;
    if (*level == "2") sizes.l2 = size;
    if (*level == "3") sizes.l3 = size;
  }
#if defined(__linux__) && defined(_SC_LEVEL1_DCACHE_SIZE)
  if (real) {  // sysfs knows no caches in some virtual machines; what glibc got from cpuid is better than nothing
    const auto fill = [](int64_t& size, int name) {
      if (size == 0) size = std::max<int64_t>(sysconf(name), 0);
    };
    fill(sizes.l1d, _SC_LEVEL1_DCACHE_SIZE);
    fill(sizes.l2, _SC_LEVEL2_CACHE_SIZE);
    fill(sizes.l3, _SC_LEVEL3_CACHE_SIZE);
  }
#elif defined(__APPLE__)
  if (real) sizes = {sysctl_value("hw.l1dcachesize"), sysctl_value("hw.l2cachesize"), sysctl_value("hw.l3cachesize")};
#endif
  return sizes;
}

std::vector<NumaNode> read_nodes(const std::string& root, const std::vector<int>& online) {
  const std::string directory = root + "/sys/devices/system/node";
  const auto ids = read_cpu_list(directory + "/possible").value_or(std::vector<int>{});
  const auto up = read_cpu_list(directory + "/online");
  auto memory = read_cpu_list(directory + "/has_memory");
  if (!memory) memory = read_cpu_list(directory + "/has_normal_memory");
  std::vector<NumaNode> nodes;
  for (const int id : ids.empty() ? up.value_or(ids) : ids) {
    const bool is_online = !up || contains(*up, id);
    const auto cpus = read_cpu_list(directory + "/node" + std::to_string(id) + "/cpulist");
    if (!cpus && !is_online) continue;  // a possible node that does not exist
    nodes.push_back({id, cpus.value_or(std::vector<int>{}), is_online, !memory || contains(*memory, id)});
  }
  if (nodes.empty()) nodes.push_back({0, online, true, true});
  return nodes;
}

}  // namespace

Topology read_topology(const std::string& root, const std::optional<std::vector<int>>& allowed) {
  Topology t;
  const std::string cpus = root + "/sys/devices/system/cpu";
  const int visible = static_cast<int>(std::thread::hardware_concurrency());
  t.allowed = allowed ? *allowed : thread_cpus().value_or(std::vector<int>{});
  std::sort(t.allowed.begin(), t.allowed.end());
  t.allowed.erase(std::unique(t.allowed.begin(), t.allowed.end()), t.allowed.end());
  t.online = read_cpu_list(cpus + "/online").value_or(std::vector<int>{});
  if (t.online.empty()) t.online = t.allowed.empty() ? first_cpus(visible) : t.allowed;
  std::vector<int> usable;
  std::set_intersection(t.allowed.begin(), t.allowed.end(), t.online.begin(), t.online.end(),
                        std::back_inserter(usable));
  if (!usable.empty()) t.allowed = usable;
  if (t.allowed.empty()) t.allowed = t.online;

  t.nodes = read_nodes(root, t.online);
  std::map<int, int> node_of;
  for (const NumaNode& node : t.nodes) {
    for (const int cpu : node.cpus) node_of[cpu] = node.id;
  }

  std::map<int, size_t> core_of;  // lowest sibling, allowed or not -> index in t.cores
  for (const int cpu : t.allowed) {
    const std::string directory = cpus + "/cpu" + std::to_string(cpu) + "/topology";
    auto siblings = read_cpu_list(directory + "/core_cpus_list");  // since Linux 5.2; earlier under the second name
    if (!siblings) siblings = read_cpu_list(directory + "/thread_siblings_list");
    const bool sane = siblings && contains(*siblings, cpu);
    const auto [entry, is_new] = core_of.try_emplace(sane ? siblings->front() : cpu, t.cores.size());
    if (is_new) {
      const auto node = node_of.find(cpu);
      t.cores.push_back({{}, node == node_of.end() ? t.nodes.front().id : node->second});
    }
    t.cores[entry->second].cpus.push_back(cpu);
  }
#if defined(__APPLE__)
  if (root.empty() && !allowed) {  // numbers only: nothing can be pinned, and nothing says which CPUs are siblings
    const auto count = static_cast<size_t>(std::max<int64_t>(sysctl_value("hw.physicalcpu"), 1));
    if (count < t.cores.size()) t.cores.resize(count);
  }
#endif
  t.caches = read_caches(cpus + "/cpu" + std::to_string(t.allowed.front()), root.empty());
  return t;
}

ThreadDecision default_threads(const Topology& topology, std::optional<double> quota) {
  const int cores = static_cast<int>(topology.cores.size());
  const auto text = [](size_t n, const char* what) { return std::to_string(n) + " " + what + (n == 1 ? "" : "s"); };
  ThreadDecision decision{std::max(cores, 1), text(topology.cores.size(), "physical core") + " within " +
                                                  text(topology.allowed.size(), "allowed CPU")};
  if (quota && std::floor(*quota) < decision.threads) {
    decision.threads = std::max(1, static_cast<int>(std::floor(*quota)));
    char number[32];
    std::snprintf(number, sizeof(number), "%.4g", *quota);
    decision.reason += std::string(", limited by the cgroup quota of ") + number + " CPUs";
  }
  return decision;
}

std::string narrow_mask_note(size_t thread_cpus, size_t main_thread_cpus, size_t cpuset_cpus) {
  if (thread_cpus != 1) return "";
  const auto note = [](const std::string& who) {
    return "the thread that created the pool may run on 1 CPU only, while " + who +
           " (OMP_PROC_BIND, GOMP_CPU_AFFINITY and KMP_AFFINITY pin threads like that)";
  };
  if (main_thread_cpus > 1) return note("the process's main thread may run on " + std::to_string(main_thread_cpus));
  if (cpuset_cpus > 1) return note("the process's cpuset has " + std::to_string(cpuset_cpus));
  return "";
}

}  // namespace cpu_moe::sys
