// Keeping torch's own threads off the cores that the pool needs.
//
// With OpenMP, which torch uses on Linux, the threads of its intra-op pool spin for milliseconds after each of torch's
// parallel operators, in case another follows. In a model whose layers alternate between torch's operators and ours
// they are still spinning when the pool's workers start, one on each core, and the kernel shares the core out in slices
// of milliseconds: a layer of 500 us takes 4 ms. So while one of our operators runs they are given a task: to sleep
// until it has ended. Then they spin again, ready for torch. Nobody's thread count, affinity or waiting policy changes.
#pragma once

#include "../system/function_ref.h"

namespace cpu_moe::ops {

// Runs job(), with the torch threads that belong to the calling thread asleep if they have been active since the last
// time. Only where torch uses OpenMP with more than one thread; not inside one of torch's parallel regions, nor in a
// forked child, where OpenMP's threads do not exist; not with CPU_MOE_OPENMP=keep. Exceptions of job() pass through.
// std::invalid_argument for a CPU_MOE_OPENMP that is neither auto (the default) nor keep.
void run_beside_torch(sys::FunctionRef<void()> job);

}  // namespace cpu_moe::ops
