// What the tests of csrc/system share: checks, a directory with a /proc and /sys of its own, and their list.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "../../csrc/system/pool.h"

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define SANITIZED 1
#else
#define SANITIZED 0
#endif

#if defined(__SANITIZE_THREAD__)
inline constexpr bool kForkedThreads = false;  // it aborts when a child reuses the id of a parent's thread
#else
inline constexpr bool kForkedThreads = true;
#endif

namespace system_test {

using namespace cpu_moe::sys;
namespace fs = std::filesystem;

inline std::string text(const std::string& s) { return s; }
template <typename T>
std::string text(const T& value) {
  std::ostringstream out;
  out << value;
  return out.str();
}
template <typename T>
std::string text(const std::vector<T>& list) {
  std::string out = "[";
  for (const T& item : list) out += (out.size() > 1 ? " " : "") + text(item);
  return out + "]";
}
template <typename T>
std::string text(const std::optional<T>& value) {
  return value ? text(*value) : "none";
}

[[noreturn]] inline void fail(const char* where, int line, const std::string& message) {
  throw std::runtime_error(std::string(where) + ":" + std::to_string(line) + ": " + message);
}

#define CHECK(condition)                                                 \
  do {                                                                   \
    if (!(condition)) fail(__func__, __LINE__, "not true: " #condition); \
  } while (0)
#define CHECK_EQ(actual, expected)                                                                   \
  do {                                                                                               \
    const auto a_ = (actual);                                                                        \
    const decltype(a_) e_ = (expected);                                                              \
    if (!(a_ == e_)) fail(__func__, __LINE__, #actual " is " + text(a_) + ", expected " + text(e_)); \
  } while (0)

template <typename Error>
std::string thrown(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

using Ints = std::vector<int>;

// A directory with a /proc and /sys of its own.
class Tree {
 public:
  Tree() {
    std::string name = (fs::temp_directory_path() / "cpu_moe_test_XXXXXX").string();
    CHECK(mkdtemp(name.data()) != nullptr);
    root_ = name;
  }
  ~Tree() { fs::remove_all(root_); }
  const std::string& root() const { return root_; }

  Tree& file(const std::string& path, const std::string& content) {
    fs::create_directories(fs::path(root_ + path).parent_path());
    std::ofstream(root_ + path) << content << "\n";
    return *this;
  }
  Tree& cpu(int n, const std::string& siblings, const char* name = "core_cpus_list") {
    return file("/sys/devices/system/cpu/cpu" + std::to_string(n) + "/topology/" + name, siblings);
  }
  Tree& online(const std::string& list) { return file("/sys/devices/system/cpu/online", list); }
  Tree& cache(int cpu, int index, const std::string& level, const std::string& type, const std::string& size) {
    const std::string base =
        "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/cache/index" + std::to_string(index) + "/";
    return file(base + "level", level).file(base + "type", type).file(base + "size", size);
  }

 private:
  std::string root_;
};

// One job that uses what the layers use: ranges, several phases, plain memory handed over by the barriers.
void check_job(int threads);

// system_topology.cpp
void cpu_lists();
void topology_smt();
void topology_hybrid();
void topology_container();
void topology_unreadable();
void narrow_masks();
void quota_v2();
void quota_v2_container();
void quota_v1();
void affinity();

// system_pool.cpp
void work_ranges();
void pool_is_lazy();
void pool_sizes();
void pool_barriers();
void pool_exceptions();
void pool_nested();
void pool_callers();
void pool_float_mode();
void pool_signals();
void pool_idles();

// system_process.cpp
void pool_fork();
void environment();
void pool_affinity();
void thread_limit();
void oversubscription();
int bad_environment();
int three_threads();

}  // namespace system_test
