// Opens and closes a region of code that may use a tier's instructions.
//
// torch.utils.cpp_extension.load has one flag set for all sources, so a tier's instructions come from a pragma inside
// its own translation unit. Standard headers must be included before the region: otherwise their weak inline functions
// would carry the tier's instructions, and the linker keeps one copy of each for the whole library.
#pragma once

#define CPU_MOE_PRAGMA(text) _Pragma(#text)
#if defined(CPU_MOE_EMULATED)
// A build of the tests in which portable code stands for the tiers' intrinsics (tests/cpp/emulated): baseline only.
#define CPU_MOE_TARGET_BEGIN(isa)
#define CPU_MOE_TARGET_END
#elif defined(__clang__)
#define CPU_MOE_TARGET_BEGIN(isa) \
  CPU_MOE_PRAGMA(clang attribute push(__attribute__((target(isa))), apply_to = function))
#define CPU_MOE_TARGET_END CPU_MOE_PRAGMA(clang attribute pop)
#else
#define CPU_MOE_TARGET_BEGIN(isa)  \
  CPU_MOE_PRAGMA(GCC push_options) \
  CPU_MOE_PRAGMA(GCC target(isa))
#define CPU_MOE_TARGET_END CPU_MOE_PRAGMA(GCC pop_options)
#endif
#define CPU_MOE_INLINE inline __attribute__((always_inline))
