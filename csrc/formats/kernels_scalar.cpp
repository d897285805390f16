// The scalar tier: plain C++, every machine.
#include "tier_prelude.h"

#define CPU_MOE_TIER scalar
#include "../simd/scalar.h"

#include "tier_kernels.h"
