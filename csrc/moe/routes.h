// Routes grouped by expert, so that an expert's rows are read and decoded once for all its tokens.
#pragma once

#include <cstdint>
#include <vector>

#include "layer.h"

namespace cpu_moe {

int64_t read_id(const Experts& call, int64_t token, int64_t slot);
float read_float(const View2D& view, int64_t i, int64_t j);

struct Route {
  int32_t token;  // within the round
  int32_t slot;
  float weight;
};

struct Group {
  int64_t expert;
  int64_t first;  // in Routes::routes
  int64_t count;
};

struct Routes {
  std::vector<Route> routes;      // by expert, then token, then slot
  std::vector<Group> groups;      // experts that have routes, ascending
  std::vector<int32_t> of_token;  // [tokens, top_k]: index into routes, -1 for skipped ones
};

// Routes of tokens [first, first + count).
void collect_routes(const Experts& call, int64_t first, int64_t count, Routes& out);

}  // namespace cpu_moe
