// Independent items on the pool, for operators that need no phases.
#pragma once

#include <cstdint>

#include "../system/pool.h"
#include "../system/work.h"
#include "checks.h"
#include "torch_threads.h"

namespace cpu_moe::ops {

// body(item) for every item in [0, items), in no order.
template <class Body>
void parallel_for(int64_t items, const Body& body) {
  const auto job = [&] {
    const int threads = sys::thread_count();
    sys::WorkRanges work;
    work.reset(items, threads);
    sys::run(threads, [&](sys::Team& team) {
      int64_t item;
      while (work.next(team.rank(), item)) body(item);
    });
  };
  as_value_error([&] { run_beside_torch(job); });
}

}  // namespace cpu_moe::ops
