#include "cgroup.h"

#include <algorithm>
#include <sstream>
#include <string_view>

#include "read_file.h"

namespace cpu_moe::sys {
namespace {

// One hierarchy that the process is in: its directory, and where the hierarchy is mounted (an ancestor, or equal).
struct Group {
  bool v2;
  std::string mount;
  std::string path;  // relative to the mount: "" or "/a/b"
};

bool has_word(std::string_view list, std::string_view word) {
  while (!list.empty()) {
    const auto item = list.substr(0, list.find(','));
    if (item == word) return true;
    list.remove_prefix(std::min(list.size(), item.size() + 1));
  }
  return false;
}

// mountinfo writes space, tab, newline and backslash as \040 and so on.
std::string unescape(const std::string& text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto octal = [&](size_t k) { return k < text.size() && text[k] >= '0' && text[k] <= '7'; };
    if (text[i] == '\\' && octal(i + 1) && octal(i + 2) && octal(i + 3)) {
      out += static_cast<char>((text[i + 1] - '0') * 64 + (text[i + 2] - '0') * 8 + (text[i + 3] - '0'));
      i += 3;
    } else {
      out += text[i];
    }
  }
  return out;
}

struct Mount {
  bool v2;
  std::string options;  // v1: names the controllers
  std::string root;     // which directory of the hierarchy is mounted
  std::string point;
};

// man 5 proc_pid_mountinfo: id parent major:minor root point options [tags...] - type source super_options
std::vector<Mount> cgroup_mounts(const std::string& root) {
  std::vector<Mount> mounts;
  std::istringstream lines(read_file(root + "/proc/self/mountinfo").value_or(""));
  for (std::string line; std::getline(lines, line);) {
    const auto dash = line.find(" - ");
    if (dash == line.npos) continue;
    std::istringstream head(line.substr(0, dash)), tail(line.substr(dash + 3));
    std::string skip, in, point, type, source, options;
    head >> skip >> skip >> skip >> in >> point;
    tail >> type >> source >> options;
    if (type == "cgroup2" || type == "cgroup")
      mounts.push_back({type == "cgroup2", options, unescape(in), unescape(point)});
  }
  if (mounts.empty()) {  // where everybody mounts them
    mounts.push_back({true, "", "/", "/sys/fs/cgroup"});
    mounts.push_back({true, "", "/", "/sys/fs/cgroup/unified"});
    for (const char* name : {"cpu", "cpuset", "cpu,cpuacct", "cpuacct,cpu"}) {
      mounts.push_back({false, name, "/", std::string("/sys/fs/cgroup/") + name});
    }
  }
  return mounts;
}

// The process's directories in the hierarchies that carry `controller`.
std::vector<Group> groups_of(const std::string& controller, const std::string& root) {
  std::vector<Group> groups;
  const auto mounts = cgroup_mounts(root);
  std::istringstream lines(read_file(root + "/proc/self/cgroup").value_or(""));
  for (std::string line; std::getline(lines, line);) {  // hierarchy:controllers:path
    const auto first = line.find(':');
    const auto second = first == line.npos ? line.npos : line.find(':', first + 1);
    if (second == line.npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    std::string path = line.substr(second + 1);
    const bool v2 = controllers.empty();
    if (!v2 && !has_word(controllers, controller)) continue;
    for (const Mount& mount : mounts) {
      if (mount.v2 != v2 || (!v2 && !has_word(mount.options, controller))) continue;
      // A container may see the host's path, but have only its own subtree mounted: the part below the mount counts.
      // A path that is not below it (also "/../x" from another namespace) leaves the mount point itself.
      std::string below = path;
      if (mount.root != "/") below = path.starts_with(mount.root) ? path.substr(mount.root.size()) : "";
      if (below == "/" || !below.starts_with('/') || below.find("/..") != below.npos) below.clear();
      groups.push_back({v2, root + mount.point, below});
    }
  }
  return groups;
}

// Calls visit(directory) for the group and its ancestors, mount point last, until it returns true.
template <typename Visit>
void walk_up(const Group& group, Visit&& visit) {
  for (std::string path = group.path;; path.erase(path.rfind('/'))) {
    if (visit(group.mount + path) || path.empty()) return;
  }
}

// "150000 100000" or "max 100000"; the period may be missing.
std::optional<double> quota_v2(const std::string& directory) {
  std::istringstream text(read_file(directory + "/cpu.max").value_or(""));
  std::string quota, period;
  text >> quota >> period;
  const auto q = parse_int<long long>(quota);
  const auto p = period.empty() ? 100000 : parse_int<long long>(period).value_or(0);
  if (!q || *q <= 0 || p <= 0) return std::nullopt;
  return static_cast<double>(*q) / static_cast<double>(p);
}

std::optional<double> quota_v1(const std::string& directory) {
  const auto q = parse_int<long long>(read_file(directory + "/cpu.cfs_quota_us").value_or(""));
  const auto p = parse_int<long long>(read_file(directory + "/cpu.cfs_period_us").value_or("100000"));
  if (!q || *q <= 0 || !p || *p <= 0) return std::nullopt;  // -1: unlimited
  return static_cast<double>(*q) / static_cast<double>(*p);
}

}  // namespace

std::optional<double> cgroup_cpu_quota(const std::string& root) {
  std::optional<double> least;
  for (const Group& group : groups_of("cpu", root)) {
    walk_up(group, [&](const std::string& directory) {
      const auto quota = group.v2 ? quota_v2(directory) : quota_v1(directory);
      if (quota && (!least || *quota < *least)) least = quota;
      return false;
    });
  }
  return least;
}

std::optional<std::vector<int>> cgroup_cpuset(const std::string& root) {
  std::optional<std::vector<int>> cpus;
  for (const Group& group : groups_of("cpuset", root)) {
    walk_up(group, [&](const std::string& directory) {
      for (const char* name : {"/cpuset.cpus.effective", "/cpuset.effective_cpus", "/cpuset.cpus"}) {
        const auto list = read_cpu_list(directory + name);
        if (list && !list->empty()) {
          cpus = list;
          return true;
        }
      }
      return false;
    });
    if (cpus) break;
  }
  return cpus;
}

}  // namespace cpu_moe::sys
