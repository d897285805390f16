// Standard headers for a tier's translation unit: all of them, before its target region opens (see simd/target.h).
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "../simd/float_bits.h"
#include "../simd/target.h"
#include "format.h"
