// The neon tier: Advanced SIMD, which belongs to aarch64's baseline.
#include "tier_prelude.h"

#if defined(__aarch64__) && defined(__ARM_NEON)
#include <arm_neon.h>

#define CPU_MOE_TIER neon
#include "../simd/neon.h"

#include "tier_kernels.h"
#endif
