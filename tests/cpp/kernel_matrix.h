// The cases of the kernel matrix, a file a subject.
#pragma once

#include "kernel_dot.h"

namespace matrix {

// Fewer shapes and codes: for sanitizers and slow emulators.
extern bool g_quick;

// Blocks in a vector of scales of the widest tier: a group of weights, for the formats that have groups.
constexpr int64_t kWidestGroup = 16;

// Another corner of memory in each case.
Placement placement_of(int64_t number);

void codes(const Format& format);        // kernel_codes.cpp
void scales(const Format& format);       // kernel_scales.cpp
void shapes(const Format& format);       // kernel_shapes.cpp
void companies(const Format& format);    // kernel_shapes.cpp
void places(const Format& format);       // kernel_shapes.cpp
void activations(const Format& format);  // kernel_activations.cpp

void elementwise(const RunningTier& tier);  // kernel_elementwise.cpp

}  // namespace matrix
