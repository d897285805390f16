// Small files of /proc and /sys.
#pragma once

#include <charconv>
#include <fstream>
#include <iterator>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace cpu_moe::sys {

// The file's text without trailing white space; nullopt when it cannot be read.
inline std::optional<std::string> read_file(const std::string& path) {
  std::ifstream in(path);
  if (!in) return std::nullopt;
  std::string text{std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
  if (in.bad()) return std::nullopt;
  text.erase(text.find_last_not_of(" \t\r\n") + 1);
  return text;
}

// The whole of `text` as a decimal number; nullopt for anything else, including surrounding spaces and overflow.
template <typename Int>
std::optional<Int> parse_int(std::string_view text) {
  Int value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return value;
}

// "0-3,8" -> 0 1 2 3 8, ascending. An empty text is an empty list; nullopt for what is no list.
inline std::optional<std::vector<int>> parse_cpu_list(std::string_view text) {
  constexpr int kLargest = 1 << 20;  // so that a broken file cannot make us allocate without end
  std::set<int> cpus;
  while (!text.empty()) {
    const std::string_view item = text.substr(0, text.find(','));
    text.remove_prefix(item.size() < text.size() ? item.size() + 1 : text.size());
    const auto dash = item.find('-');
    const auto first = parse_int<int>(item.substr(0, dash));
    const auto last = dash == item.npos ? first : parse_int<int>(item.substr(dash + 1));
    if (!first || !last || *first < 0 || *last < *first || *last > kLargest) return std::nullopt;
    for (int cpu = *first; cpu <= *last; ++cpu) cpus.insert(cpus.end(), cpu);
  }
  return std::vector<int>(cpus.begin(), cpus.end());
}

inline std::optional<std::vector<int>> read_cpu_list(const std::string& path) {
  const auto text = read_file(path);
  return text ? parse_cpu_list(*text) : std::nullopt;
}

}  // namespace cpu_moe::sys
