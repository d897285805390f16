// Instruction-set tiers: which are compiled in, which this CPU runs, which is in use.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "../formats/format.h"

namespace cpu_moe {

struct Tier {
  std::string_view name;
  bool (*supported)();  // by the CPU and the operating system
  TierKernels (*kernels)();
};

// Best first; "scalar" is last and always there.
const std::vector<Tier>& compiled_tiers();

// The tier in use: set_tier()'s, else CPU_MOE_ISA's, else the best supported one.
// Throws std::invalid_argument when CPU_MOE_ISA names no tier or one that this machine cannot run.
const Tier& active_tier();
const TierKernels& active_kernels();

// "auto" returns to the default. Throws std::invalid_argument as above.
void set_tier(std::string_view name);

// What CPU_MOE_ISA or set_tier() asked for; empty when nothing.
std::string requested_tier();

}  // namespace cpu_moe
