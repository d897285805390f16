// Weight banks for the kernels' tests: how each format is filled and decoded, and how a bank lies in memory. A weight
// format is one row of kFormats.
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "../../csrc/formats/format.h"
#include "guarded.h"
#include "kernel_reference.h"

namespace banks {

using cpu_moe::DType;
using cpu_moe::kMaxParts;
using cpu_moe::Precision;
using cpu_moe::Weight;

// The same numbers everywhere (std's distributions differ between libraries; so does the order in which two calls in
// one expression are made).
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15u + 1) {}
  uint64_t bits() {  // splitmix64
    uint64_t z = state_ += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
  }
  int64_t below(int64_t n) { return static_cast<int64_t>((bits() >> 16) % static_cast<uint64_t>(n)); }
  double uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }
  // Four uniform numbers summed: variance 1, and close enough to a normal distribution.
  double normal() {
    double sum = -2;
    for (int i = 0; i < 4; ++i) sum += uniform();
    return sum * 1.7320508;
  }

 private:
  uint64_t state_;
};

constexpr int64_t kExperts = 2;

// The parts of a bank, contiguous; a test uses one expert, the other one is there to be left alone.
struct Bank {
  int format;  // index into registry()
  int64_t rows, cols;
  std::vector<uint8_t> part[kMaxParts];
  DType dtype[kMaxParts];

  const cpu_moe::FormatSpec& spec() const { return cpu_moe::registry()[static_cast<size_t>(format)]; }
  int64_t part_rows(int p) const { return (rows + spec().parts[p].row_block - 1) / spec().parts[p].row_block; }
  int64_t part_cols(int p) const {
    const cpu_moe::PartSpec& s = spec().parts[p];
    return s.col_block == 0 ? 1 : (cols + s.col_block - 1) / s.col_block * s.col_units;
  }
  uint8_t* at(int p, int64_t expert, int64_t row, int64_t col) {
    const int64_t index = (expert * part_rows(p) + row / spec().parts[p].row_block) * part_cols(p) + col;
    return &part[p][static_cast<size_t>(index * cpu_moe::size_of(dtype[p]))];
  }
  const uint8_t* at(int p, int64_t expert, int64_t row, int64_t col) const {
    return const_cast<Bank*>(this)->at(p, expert, row, col);
  }
};

template <class T>
T read(const uint8_t* p) {
  T v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <class T>
void write(uint8_t* p, T v) {
  std::memcpy(p, &v, sizeof v);
}

// ----------------------------------------------------------------------------------------------------- decode and fill

inline double f32(uint32_t bits) { return reference::number(bits, 8, 23, reference::Top::kIeee); }
inline double float_at(DType dtype, const uint8_t* p) {
  return dtype == DType::kF32   ? f32(read<uint32_t>(p))
         : dtype == DType::kF16 ? reference::f16(read<uint16_t>(p))
                                : reference::bf16(read<uint16_t>(p));
}

// Element c of 4-bit codes, two to a byte, the low one first.
inline uint32_t nibble(uint8_t byte, int64_t c) { return byte >> (c % 2 * 4) & 15u; }
inline void set_nibble(uint8_t* byte, bool high, uint32_t code) {
  *byte = static_cast<uint8_t>(high ? (*byte & 0x0F) | code << 4 : (*byte & 0xF0) | code);
}

inline double dense_weight(const Bank& b, int64_t e, int64_t r, int64_t c) {
  return float_at(b.dtype[0], b.at(0, e, r, c));
}
inline double mx_weight(const Bank& b, int64_t e, int64_t r, int64_t c) {
  return reference::e2m1(nibble(*b.at(0, e, r, c / 2), c)) * reference::e8m0(*b.at(1, e, r, c / 32));
}
inline double nv_weight(const Bank& b, int64_t e, int64_t r, int64_t c) {
  return reference::e2m1(nibble(*b.at(0, e, r, c / 2), c)) * reference::e4m3(*b.at(1, e, r, c / 16)) *
         f32(read<uint32_t>(b.at(2, e, r, 0)));
}
inline double fp8_weight(const Bank& b, int64_t e, int64_t r, int64_t c) {
  return reference::e4m3(*b.at(0, e, r, c)) * float_at(b.dtype[1], b.at(1, e, r, c / 128));
}
// Byte j of a block's 16 holds elements j (low) and j + 16 (high); the block begins with d.
inline double q4_0_weight(const Bank& b, int64_t e, int64_t r, int64_t c) {
  const uint8_t* block = b.at(0, e, r, c / 32 * 18);
  const uint32_t q = block[2 + c % 16] >> (c % 32 / 16 * 4) & 15u;
  return (static_cast<double>(q) - 8) * reference::f16(read<uint16_t>(block));
}

inline void set_dense_code(Bank& b, int64_t e, int64_t r, int64_t c, uint32_t code) {
  if (b.dtype[0] == DType::kF32) return write(b.at(0, e, r, c), code);
  write(b.at(0, e, r, c), static_cast<uint16_t>(code));
}
inline void set_fp4_code(Bank& b, int64_t e, int64_t r, int64_t c, uint32_t code) {
  set_nibble(b.at(0, e, r, c / 2), c % 2 != 0, code);
}
inline void set_fp8_code(Bank& b, int64_t e, int64_t r, int64_t c, uint32_t code) {
  *b.at(0, e, r, c) = static_cast<uint8_t>(code);
}
inline void set_q4_0_code(Bank& b, int64_t e, int64_t r, int64_t c, uint32_t code) {
  set_nibble(b.at(0, e, r, c / 32 * 18) + 2 + c % 16, c % 32 >= 16, code);
}

inline void no_scale(Bank&, int64_t, int64_t, int64_t, uint32_t) {}
inline void set_byte_scale(Bank& b, int64_t e, int64_t r, int64_t block, uint32_t code) {
  *b.at(1, e, r, block) = static_cast<uint8_t>(code);
}
inline void set_float_scale(Bank& b, int64_t e, int64_t r, int64_t block, uint32_t code) {
  if (b.dtype[1] == DType::kF32) return write(b.at(1, e, r, block), code);
  write(b.at(1, e, r, block), static_cast<uint16_t>(code >> 16));
}
inline void set_q4_0_scale(Bank& b, int64_t e, int64_t r, int64_t block, uint32_t code) {
  write(b.at(0, e, r, block * 18), static_cast<uint16_t>(code));
}

inline uint32_t bits_of(double x) { return std::bit_cast<uint32_t>(static_cast<float>(x)); }

// Scales that make a row's result about 1 for activations of about 1, in code bits.
inline uint32_t random_e8m0(Random& random, int64_t cols) {
  return static_cast<uint32_t>(std::lround(126 - std::log2(2.9 * std::sqrt(static_cast<double>(cols)))) +
                               random.below(4));
}
inline uint32_t random_e4m3(Random& random, int64_t) {
  const int64_t sign = random.below(2) * 0x80;
  return static_cast<uint32_t>(sign + 0x20 + random.below(0x30));
}
inline uint32_t random_f32(Random& random, int64_t cols) {
  return bits_of((random.uniform() + 0.1) * 0.02 / std::sqrt(static_cast<double>(cols)));
}
inline uint32_t random_f16(Random& random, int64_t cols) {  // of about 0.1 / sqrt(cols), both signs
  const double d = std::fabs(random.normal() * 0.2 / std::sqrt(static_cast<double>(cols))) + 0x1p-13;
  const int exponent = std::ilogb(d);
  const auto mantissa = static_cast<uint32_t>(std::ldexp(d, 10 - exponent)) - 1024;
  return static_cast<uint32_t>(random.below(2)) << 15 | static_cast<uint32_t>(exponent + 15) << 10 | mantissa;
}
inline uint32_t random_dense(Random& random, int64_t cols, DType dtype) {
  const double x = random.normal() / std::sqrt(static_cast<double>(cols));
  if (dtype == DType::kF32) return bits_of(x);
  if (dtype == DType::kBF16) return bits_of(x) >> 16;
  const double magnitude = std::fabs(x) + 0x1p-13;
  const int exponent = std::ilogb(magnitude);
  return (x < 0 ? 0x8000u : 0u) | static_cast<uint32_t>(exponent + 15) << 10 |
         (static_cast<uint32_t>(std::ldexp(magnitude, 10 - exponent)) - 1024);
}

// Every float32 scale that a kernel might trip over.
inline const std::vector<uint32_t>& float_scales() {
  static const std::vector<uint32_t> scales = [] {
    std::vector<uint32_t> all;
    for (const double x :
         {1.0,      0.5,      1.5,      0x1.fep0,   3.0,      0x1p-20,  0x1p20,   0x1p60,  0x1p-60, 1e-30,      1e30,
          0x1p-100, 0x1p-120, 0x1p-126, 0x1.8p-127, 0x1p-133, 0x1p-140, 0x1p-149, 0x1p100, 0x1p119, 0x1.fep127, 0.0}) {
      all.push_back(bits_of(x));
      all.push_back(bits_of(-x));
    }
    for (const uint32_t special : {0x7F800000u, 0xFF800000u, 0x7FC00000u, 0xFFC00000u}) all.push_back(special);
    return all;
  }();
  return scales;
}
inline std::vector<uint32_t> up_to(uint32_t count) {
  std::vector<uint32_t> all(count);
  for (uint32_t i = 0; i < count; ++i) all[i] = i;
  return all;
}

// ------------------------------------------------------------------------------------------------------ the formats

struct Format {
  std::string_view name;     // the registry's
  std::string_view variant;  // another dtype of a part
  DType scale_dtype;         // of part 1, where it may have two
  int activation_block;      // of int16 activations; 0: float32
  uint32_t codes;            // 0: too many to try them all
  uint32_t one;              // the code of 1
  int scale_block;           // 0: no scales
  uint32_t scale_one;        // the scale of 1
  double (*weight)(const Bank&, int64_t expert, int64_t row, int64_t col);
  void (*set_code)(Bank&, int64_t expert, int64_t row, int64_t col, uint32_t code);
  void (*set_scale)(Bank&, int64_t expert, int64_t row, int64_t block, uint32_t code);
  std::vector<uint32_t> (*scales)();  // all of them
  uint32_t (*random_scale)(Random&, int64_t cols);

  std::string id() const { return std::string(name) + (variant.empty() ? "" : "-" + std::string(variant)); }
  const cpu_moe::FormatSpec& spec() const { return cpu_moe::registry()[static_cast<size_t>(index())]; }
  int index() const { return cpu_moe::find_format(name); }
  reference::Activations activations(Precision precision) const {
    const bool fast = precision == Precision::kFast;
    if (name == "q4_0" && fast) return {reference::Activations::kQ8_0, 0, 0};
    const auto rule = name == "ds_fp4" ? reference::Activations::kDsFp4 : reference::Activations::kNone;
    if (fast) return {rule, spec().block == 1 ? 32 : spec().block, reference::kInt8Step};
    return {rule, activation_block, reference::kInt16Step};
  }
};

constexpr auto kNoScales = [] { return std::vector<uint32_t>(); };
constexpr auto kBytes = [] { return up_to(256); };
constexpr auto kHalves = [] { return up_to(65536); };
constexpr auto kFloats = [] { return float_scales(); };

inline const Format kFormats[] = {
    {"bf16", "", DType::kF32, 0, 65536, 0x3F80, 0, 0, dense_weight, set_dense_code, no_scale, kNoScales, nullptr},
    {"f16", "", DType::kF32, 0, 65536, 0x3C00, 0, 0, dense_weight, set_dense_code, no_scale, kNoScales, nullptr},
    {"f32", "", DType::kF32, 0, 0, 0x3F800000, 0, 0, dense_weight, set_dense_code, no_scale, kNoScales, nullptr},
    {"mxfp4", "", DType::kU8, 32, 16, 2, 32, 127, mx_weight, set_fp4_code, set_byte_scale, kBytes, random_e8m0},
    {"nvfp4", "", DType::kE4M3, 16, 16, 2, 16, 0x38, nv_weight, set_fp4_code, set_byte_scale, kBytes, random_e4m3},
    {"ds_fp4", "", DType::kU8, 32, 16, 2, 32, 127, mx_weight, set_fp4_code, set_byte_scale, kBytes, random_e8m0},
    {"fp8_block", "", DType::kF32, 0, 256, 0x38, 128, 0x3F800000, fp8_weight, set_fp8_code, set_float_scale, kFloats,
     random_f32},
    {"fp8_block", "bf16", DType::kBF16, 0, 256, 0x38, 128, 0x3F800000, fp8_weight, set_fp8_code, set_float_scale,
     kFloats, random_f32},
    {"q4_0", "", DType::kU8, 32, 16, 9, 32, 0x3C00, q4_0_weight, set_q4_0_code, set_q4_0_scale, kHalves, random_f16},
};

// All codes 0, all scales 1.
inline Bank empty_bank(const Format& format, int64_t rows, int64_t cols) {
  Bank bank{format.index(), rows, cols, {}, {}};
  for (int p = 0; p < format.spec().part_count; ++p) {
    bank.dtype[p] = p == 1 ? format.scale_dtype : format.spec().parts[p].dtypes[0];
    bank.part[p].resize(
        static_cast<size_t>(kExperts * bank.part_rows(p) * bank.part_cols(p) * cpu_moe::size_of(bank.dtype[p])));
  }
  for (int64_t e = 0; e < kExperts; ++e) {
    for (int64_t r = 0; r < rows; ++r) {
      if (format.scale_block != 0) {
        for (int64_t c = 0; c < cols; c += format.scale_block) {
          format.set_scale(bank, e, r, c / format.scale_block, format.scale_one);
        }
      }
      if (format.spec().part_count == 3) write(bank.at(2, e, r, 0), 1.0f);
    }
  }
  return bank;
}

// Codes that stand for finite numbers, and the others.
inline std::pair<std::vector<uint32_t>, std::vector<uint32_t>> sort_codes(const Format& format) {
  std::pair<std::vector<uint32_t>, std::vector<uint32_t>> sorted;
  if (format.codes == 0) {
    sorted.second = {0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF};
    return sorted;
  }
  Bank bank = empty_bank(format, 1, format.spec().block);
  for (uint32_t code = 0; code < format.codes; ++code) {
    format.set_code(bank, 0, 0, 0, code);
    (std::isfinite(format.weight(bank, 0, 0, 0)) ? sorted.first : sorted.second).push_back(code);
  }
  return sorted;
}

inline Bank random_bank(const Format& format, int64_t rows, int64_t cols, Random& random) {
  Bank bank = empty_bank(format, rows, cols);
  for (int64_t e = 0; e < kExperts; ++e) {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < cols; ++c) {
        uint32_t code;
        if (format.scale_block == 0) {
          code = random_dense(random, cols, bank.dtype[0]);
        } else {
          code = static_cast<uint32_t>(random.below(format.codes));
          if (format.codes == 256 && (code & 0x7F) == 0x7F) code ^= 1;  // no NaN
        }
        format.set_code(bank, e, r, c, code);
        if (format.scale_block != 0 && c % format.scale_block == 0) {
          format.set_scale(bank, e, r, c / format.scale_block, format.random_scale(random, cols));
        }
      }
      if (format.spec().part_count == 3) {  // another one for every row
        const double global = (random.uniform() * 0.2 + 0.01) / std::sqrt(static_cast<double>(cols));
        write(bank.at(2, e, r, 0), static_cast<float>(global));
      }
    }
  }
  return bank;
}

inline std::vector<double> decode(const Format& format, const Bank& bank, int64_t expert, int64_t row) {
  std::vector<double> out(static_cast<size_t>(bank.cols));
  for (int64_t c = 0; c < bank.cols; ++c) out[static_cast<size_t>(c)] = format.weight(bank, expert, row, c);
  return out;
}

// ---------------------------------------------------------------------------------------------------------- placement

struct Placement {
  guarded::Side side = guarded::Side::kEnd;
  int shift = 0;    // bytes between the forbidden page and each part
  int64_t gap = 0;  // bytes between two experts
  enum Layout { kContiguous, kTransposed, kPadded } layout = kContiguous;  // of parts with any strides
};

// A bank copied to where reading beside it ends the program.
class Placed {
 public:
  Weight place(const Bank& bank, const Placement& placement) {
    Weight w;
    w.format = bank.format;
    w.rows = bank.rows;
    w.cols = bank.cols;
    for (int p = 0; p < bank.spec().part_count; ++p) {
      const int64_t size = cpu_moe::size_of(bank.dtype[p]);
      const int64_t rows = bank.part_rows(p), cols = bank.part_cols(p);
      int64_t row_stride = cols * size, col_stride = size;
      if (bank.spec().parts[p].any_strides && placement.layout == Placement::kTransposed) {
        row_stride = size, col_stride = rows * size;
      } else if (bank.spec().parts[p].any_strides && placement.layout == Placement::kPadded) {
        row_stride = (2 * cols + 3) * size, col_stride = 2 * size;
      }
      const int64_t each = (rows - 1) * row_stride + (cols - 1) * col_stride + size;
      const int64_t expert_stride = each + placement.gap;
      uint8_t* to = arenas_[static_cast<size_t>(p)].take(static_cast<size_t>(each + (kExperts - 1) * expert_stride),
                                                         placement.side, static_cast<size_t>(placement.shift));
      for (int64_t e = 0; e < kExperts; ++e) {
        for (int64_t r = 0; r < rows; ++r) {
          const uint8_t* from = bank.part[p].data() + (e * rows + r) * cols * size;
          uint8_t* row = to + e * expert_stride + r * row_stride;
          if (col_stride == size) {
            std::memcpy(row, from, static_cast<size_t>(cols * size));
          } else {
            for (int64_t c = 0; c < cols; ++c)
              std::memcpy(row + c * col_stride, from + c * size, static_cast<size_t>(size));
          }
        }
      }
      w.part[p] = to;
      w.dtype[p] = bank.dtype[p];
      w.expert_stride[p] = expert_stride;
      // A dimension of one entry may claim any stride.
      w.row_stride[p] = rows > 1 ? row_stride : int64_t{1} << 40;
      w.col_stride[p] = bank.spec().parts[p].any_strides && cols == 1 ? int64_t{1} << 40 : col_stride;
    }
    return w;
  }

 private:
  std::array<guarded::Arena, kMaxParts> arenas_;
};

}  // namespace banks
