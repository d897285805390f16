// The vector vocabulary in plain C++: 16 bytes, 4 floats. It defines what every operation means; another tier's
// header must compute the same. It runs on every machine, and its loops are simple enough for a compiler to vectorize
// with whatever the baseline has.
#pragma once

namespace cpu_moe::scalar {

struct V {
  static constexpr int kBytes = 16;  // one "lane" of 16 bytes; wider tiers hold several
  static constexpr int kLanes = 4;
  static constexpr int kRegisters = 16;
  struct Bytes {
    uint8_t at[16];
  };
  struct I16 {
    int16_t at[8];
  };
  struct I32 {
    int32_t at[4];
  };
  struct F32 {
    float at[4];
  };
  struct Table {
    int8_t at[16];
  };

  // --- bytes and nibbles -----------------------------------------------------------------------------------------
  static CPU_MOE_INLINE Bytes load_bytes(const void* p) { return read<Bytes>(p); }
  // kBytes / 16 runs of 16 bytes, `stride` apart.
  static CPU_MOE_INLINE Bytes load_blocks(const uint8_t* p, int64_t) { return load_bytes(p); }
  // 16 int8 entries, in the form that lookup_nibbles_x256 wants.
  static CPU_MOE_INLINE Table table(const int8_t* entries) { return read<Table>(entries); }
  // out[k], k < 4: 256 * the entry for nibble k (0 lowest) of every 16-bit lane.
  static CPU_MOE_INLINE void lookup_nibbles_x256(Table table, Bytes v, I16* out) {
    for (int k = 0; k < 4; ++k) {
      out[k] = each<I16>([&](int i) {
        const uint8_t byte = v.at[2 * i + k / 2];
        return static_cast<int16_t>(table.at[k % 2 ? byte >> 4 : byte & 15] * 256);
      });
    }
  }
  static CPU_MOE_INLINE Bytes zero_bytes() { return Bytes{}; }
  // Running maximum of twice the low seven bits; 254 then says that some byte was 0x7F or 0xFF (E4M3's NaN).
  static CPU_MOE_INLINE Bytes max_magnitude(Bytes m, Bytes v) {
    return each<Bytes>([&](int i) {
      const uint8_t doubled = static_cast<uint8_t>(v.at[i] << 1);
      return m.at[i] > doubled ? m.at[i] : doubled;
    });
  }
  static CPU_MOE_INLINE bool any_magnitude_127(Bytes m) {
    bool any = false;
    for (uint8_t b : m.at) any |= b == 254;
    return any;
  }

  // --- 16-bit integers: lane i holds bytes 2i (low, "even") and 2i + 1 (high, "odd") ------------------------------
  // The low byte moved to the high one.
  static CPU_MOE_INLINE I16 even_bytes_x256(Bytes v) {
    return each<I16>([&](int i) { return static_cast<int16_t>(v.at[2 * i] << 8); });
  }
  // Nibble K (0 lowest .. 3 highest) of every 16-bit lane, unsigned.
  template <int K>
  static CPU_MOE_INLINE I16 nibble(Bytes v) {
    return each<I16>([&](int i) {
      const uint8_t byte = v.at[2 * i + K / 2];
      return static_cast<int16_t>(K % 2 ? byte >> 4 : byte & 15);
    });
  }
  static CPU_MOE_INLINE I16 as_i16(Bytes v) {
    return each<I16>([&](int i) { return static_cast<int16_t>(v.at[2 * i] | v.at[2 * i + 1] << 8); });
  }
  static CPU_MOE_INLINE I16 load_i16(const int16_t* p) { return read<I16>(p); }
  // Four vectors a, and b of as many values. Lane i: sum[i] plus, for each of the four, a[2i] * b[2i] + a[2i + 1] *
  // b[2i + 1].
  static CPU_MOE_INLINE I32 dot4_add(I32 sum, const I16* a, const int16_t* b) {
    for (int v = 0; v < 4; ++v) {
      for (int i = 0; i < 8; ++i) sum.at[i / 2] += static_cast<int32_t>(a[v].at[i]) * b[8 * v + i];
    }
    return sum;
  }
  // E4M3 in the high byte of a lane (the low byte may be anything) -> bf16 bits of its value * 2^-120. Subnormal codes
  // come out as subnormal bf16, so no code is special but NaN, which comes out as 480 * 2^-120.
  static CPU_MOE_INLINE I16 e4m3_to_bf16(I16 v) {
    return each<I16>([&](int i) { return static_cast<int16_t>((v.at[i] >> 4) & 0x87F0); });
  }

  // --- 32-bit integers -------------------------------------------------------------------------------------------
  static CPU_MOE_INLINE I32 zero_i32() { return I32{}; }
  static CPU_MOE_INLINE I32 set_i32(int32_t v) {
    return each<I32>([&](int) { return v; });
  }
  static CPU_MOE_INLINE I32 load_i32(const int32_t* p) { return read<I32>(p); }
  static CPU_MOE_INLINE void store_i32(int32_t* p, I32 v) { std::memcpy(p, &v, sizeof v); }
  // Modulo 2^32, as vector instructions are: checksums of anything wrap.
  static CPU_MOE_INLINE I32 add(I32 a, I32 b) {
    return each<I32>(
        [&](int i) { return static_cast<int32_t>(static_cast<uint32_t>(a.at[i]) + static_cast<uint32_t>(b.at[i])); });
  }
  static CPU_MOE_INLINE I32 sub(I32 a, I32 b) {
    return each<I32>(
        [&](int i) { return static_cast<int32_t>(static_cast<uint32_t>(a.at[i]) - static_cast<uint32_t>(b.at[i])); });
  }
  static CPU_MOE_INLINE I32 max(I32 a, I32 b) {
    return each<I32>([&](int i) { return a.at[i] > b.at[i] ? a.at[i] : b.at[i]; });
  }
  static CPU_MOE_INLINE I32 min(I32 a, I32 b) {
    return each<I32>([&](int i) { return a.at[i] < b.at[i] ? a.at[i] : b.at[i]; });
  }
  static CPU_MOE_INLINE I32 bit_and(I32 a, I32 b) {
    return each<I32>([&](int i) { return a.at[i] & b.at[i]; });
  }
  template <int N>
  static CPU_MOE_INLINE I32 shift_left(I32 v) {
    return each<I32>([&](int i) { return static_cast<int32_t>(static_cast<uint32_t>(v.at[i]) << N); });
  }
  template <int N>  // arithmetic
  static CPU_MOE_INLINE I32 shift_right(I32 v) {
    return each<I32>([&](int i) { return v.at[i] >> N; });
  }
  static CPU_MOE_INLINE int32_t max_of(I32 v) {
    int32_t m = v.at[0];
    for (int32_t x : v.at) m = x > m ? x : m;
    return m;
  }
  // kLanes bytes, the scales of kLanes consecutive blocks, in the tier's slot order (see scale_slot), zero-extended.
  template <int Block>
  static CPU_MOE_INLINE I32 load_scale_bytes(const uint8_t* p) {
    return each<I32>([&](int i) { return static_cast<int32_t>(p[i]); });
  }
  template <int Block>  // sign-extended
  static CPU_MOE_INLINE I32 load_signed_scale_bytes(const uint8_t* p) {
    return each<I32>([&](int i) { return static_cast<int32_t>(static_cast<int8_t>(p[i])); });
  }

  // --- floats ----------------------------------------------------------------------------------------------------
  static CPU_MOE_INLINE F32 zero() { return F32{}; }
  static CPU_MOE_INLINE F32 set(float v) {
    return each<F32>([&](int) { return v; });
  }
  static CPU_MOE_INLINE F32 load(const float* p) { return read<F32>(p); }
  static CPU_MOE_INLINE F32 load_unaligned_f32(const void* p) { return read<F32>(p); }
  static CPU_MOE_INLINE void store(float* p, F32 v) { std::memcpy(p, &v, sizeof v); }
  static CPU_MOE_INLINE F32 add(F32 a, F32 b) {
    return each<F32>([&](int i) { return a.at[i] + b.at[i]; });
  }
  static CPU_MOE_INLINE F32 sub(F32 a, F32 b) {
    return each<F32>([&](int i) { return a.at[i] - b.at[i]; });
  }
  static CPU_MOE_INLINE F32 mul(F32 a, F32 b) {
    return each<F32>([&](int i) { return a.at[i] * b.at[i]; });
  }
  static CPU_MOE_INLINE F32 div(F32 a, F32 b) {
    return each<F32>([&](int i) { return a.at[i] / b.at[i]; });
  }
  // a * b + c; whether the product is rounded first is the tier's business (std::fma is a slow call on the baseline).
  static CPU_MOE_INLINE F32 fma(F32 a, F32 b, F32 c) {
    return each<F32>([&](int i) { return a.at[i] * b.at[i] + c.at[i]; });
  }
  // A NaN in v stays.
  static CPU_MOE_INLINE F32 min_keep_nan(F32 bound, F32 v) {
    return each<F32>([&](int i) { return bound.at[i] < v.at[i] ? bound.at[i] : v.at[i]; });
  }
  static CPU_MOE_INLINE F32 max_keep_nan(F32 bound, F32 v) {
    return each<F32>([&](int i) { return bound.at[i] > v.at[i] ? bound.at[i] : v.at[i]; });
  }
  static CPU_MOE_INLINE F32 to_f32(I32 v) {
    return each<F32>([&](int i) { return static_cast<float>(v.at[i]); });
  }
  // To the nearest, ties to even; undefined values for NaN and what does not fit an int32.
  static CPU_MOE_INLINE I32 round_i32(F32 v) {
    return each<I32>([&](int i) {
      const float x = v.at[i];
      return x >= -2147483648.0f && x < 2147483648.0f ? static_cast<int32_t>(std::nearbyint(x)) : INT32_MIN;
    });
  }
  static CPU_MOE_INLINE F32 as_f32(I32 v) { return std::bit_cast<F32>(v); }
  static CPU_MOE_INLINE I32 as_i32(F32 v) { return std::bit_cast<I32>(v); }
  // The bf16 in the even (low) or odd (high) 16-bit half of every 32-bit lane.
  static CPU_MOE_INLINE F32 even_bf16(I16 v) {
    return each<F32>([&](int i) { return from_high_half(v.at[2 * i]); });
  }
  static CPU_MOE_INLINE F32 odd_bf16(I16 v) {
    return each<F32>([&](int i) { return from_high_half(v.at[2 * i + 1]); });
  }
  static CPU_MOE_INLINE F32 load_f16(const void* p) {
    const auto half = read<std::array<uint16_t, 4>>(p);
    return each<F32>([&](int i) { return f16_to_f32(half[i]); });
  }
  static CPU_MOE_INLINE void store_f16(void* p, F32 v) {
    uint16_t half[4];
    for (int i = 0; i < 4; ++i) half[i] = f32_to_f16(v.at[i]);
    std::memcpy(p, half, sizeof half);
  }
  // The f16 at p, p + stride, ... of kLanes consecutive blocks, in slot order.
  template <int Block>
  static CPU_MOE_INLINE F32 gather_f16_scales(const uint8_t* p, int64_t stride) {
    return each<F32>([&](int i) { return f16_to_f32(read<uint16_t>(p + i * stride)); });
  }
  // Sum of the lanes, in a fixed order.
  static CPU_MOE_INLINE float sum(F32 v) { return (v.at[0] + v.at[2]) + (v.at[1] + v.at[3]); }
  // The sums of four vectors, each with the bits of sum().
  static CPU_MOE_INLINE void sum_each(const F32* v, float* out) {
    for (int i = 0; i < 4; ++i) out[i] = sum(v[i]);
  }
  // The scales of step K's blocks, each repeated over the Block / 8 lanes that hold its partial sums.
  template <int Block, int K>
  static CPU_MOE_INLINE F32 spread(F32 scales) {
    constexpr int kPerBlock = Block / 8;
    return each<F32>([&](int i) { return scales.at[K * (4 / kPerBlock) + i / kPerBlock]; });
  }
  // Where block `block` (0 .. kLanes - 1) of a group lies in a vector of scales.
  static constexpr int scale_slot(int /*block_size*/, int block) { return block; }
  static CPU_MOE_INLINE void prefetch(const void* p) { __builtin_prefetch(p); }

 private:
  template <class T>
  static CPU_MOE_INLINE T read(const void* p) {
    T v;
    std::memcpy(&v, p, sizeof v);
    return v;
  }
  template <class T, class F>
  static CPU_MOE_INLINE T each(F f) {
    T v;
    for (int i = 0; i < static_cast<int>(sizeof v.at / sizeof v.at[0]); ++i) v.at[i] = f(i);
    return v;
  }
  static CPU_MOE_INLINE float from_high_half(int16_t half) {
    return std::bit_cast<float>(static_cast<uint32_t>(static_cast<uint16_t>(half)) << 16);
  }
};

}  // namespace cpu_moe::scalar
