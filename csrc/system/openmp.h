// Keeping the process's OpenMP threads from spinning on the cores that the pool needs.
//
// GNU's libgomp, which torch uses on Linux, lets its threads spin for some 3 ms after each parallel region, in case
// another follows. In a model whose layers alternate between torch's operators and ours they are then still spinning
// when the pool's workers start, one on each core, and the kernel shares the core out in slices of milliseconds: a
// layer of 300 us takes 4 ms. libgomp does spin only for microseconds when it manages more threads than there are CPUs,
// but it does not know of the pool's. So where the two together outnumber the CPUs, it is shown some more: a team of
// its own, asleep for ever, that brings its count to one above the CPUs. Nobody's thread count or affinity changes.
#pragma once

#include <string>

namespace cpu_moe::sys {

// To be called before a job, with the number of threads the host gives an OpenMP region and the pool's. Acts at most
// once in a process; cheap after that. Does nothing where all threads have a CPU, where OMP_WAIT_POLICY or
// GOMP_SPINCOUNT is set (the user has decided), with CPU_MOE_OPENMP=keep, off Linux and without libgomp.
// std::invalid_argument for another value of CPU_MOE_OPENMP than auto (the default) and keep.
void share_cores_with_openmp(int openmp_threads, int pool_threads);

// What was done, and why, in words; empty before the first call.
std::string openmp_status();

}  // namespace cpu_moe::sys
