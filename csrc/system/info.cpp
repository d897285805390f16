#include "info.h"

#include <cstdio>
#include <string_view>
#include <vector>

#include "cgroup.h"
#include "pool.h"
#include "topology.h"

namespace cpu_moe::sys {
namespace {

std::string json(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20 || static_cast<unsigned char>(c) > 0x7e) {
      // Texts are ours, but quote an environment variable, whose bytes need not be UTF-8: Latin-1 is always valid JSON.
      char escape[8];
      std::snprintf(escape, sizeof(escape), "\\u%04x", static_cast<unsigned>(static_cast<unsigned char>(c)));
      out += escape;
    } else {
      out += c;
    }
  }
  return out + "\"";
}
std::string json(const std::string& text) { return json(std::string_view(text)); }
std::string json(bool value) { return value ? "true" : "false"; }
std::string json(int value) { return std::to_string(value); }
std::string json(long value) { return std::to_string(value); }
std::string json(long long value) { return std::to_string(value); }
std::string json(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.6g", value);
  for (char& c : text) {
    if (c == ',') c = '.';  // a host may have set a locale
  }
  return text;
}

std::string json(const Core& core);
std::string json(const NumaNode& node);
std::string json(const PoolStatus::Place& place);

template <typename T>
std::string json(const std::vector<T>& list) {
  std::string out = "[";
  for (const T& item : list) out += (out.size() > 1 ? ", " : "") + json(item);
  return out + "]";
}

struct Member {
  const char* name;
  std::string value;
};

std::string object(const std::vector<Member>& members) {
  std::string out = "{";
  for (const Member& m : members) out += (out.size() > 1 ? ", " : "") + json(std::string_view(m.name)) + ": " + m.value;
  return out + "}";
}

std::string json(const Core& core) { return json(core.cpus); }

std::string json(const NumaNode& node) {
  return object({{"id", json(node.id)},
                 {"cpus", json(node.cpus)},
                 {"online", json(node.online)},
                 {"has_memory", json(node.has_memory)}});
}

std::string json(const PoolStatus::Place& place) {
  return object({{"rank", json(place.rank)}, {"tid", json(place.tid)}, {"cpus", json(place.cpus)}});
}

}  // namespace

std::string system_info_json() {
  const Topology topology = read_topology();
  const auto quota = cgroup_cpu_quota();
  const auto cpuset = cgroup_cpuset();
  const PoolStatus pool = pool_status();
  return object({
      {"online_cpus", json(topology.online)},
      {"allowed_cpus", json(topology.allowed)},
      {"physical_cores", json(topology.cores)},
      {"quota", quota ? json(*quota) : "null"},
      {"cpuset", cpuset ? json(*cpuset) : "null"},
      {"nodes", json(topology.nodes)},
      {"caches", object({{"l1d", json(static_cast<long long>(topology.caches.l1d))},
                         {"l2", json(static_cast<long long>(topology.caches.l2))},
                         {"l3", json(static_cast<long long>(topology.caches.l3))}})},
      {"threads", json(pool.threads)},
      {"threads_reason", json(pool.reason)},
      {"pool", object({{"created", json(pool.created)},
                       {"pinned", json(pool.pinned)},
                       {"pinning", pool.created ? json(pool.pinning) : "null"},
                       {"workers", json(pool.workers)}})},
      {"warnings", json(pool.warnings)},
  });
}

}  // namespace cpu_moe::sys
