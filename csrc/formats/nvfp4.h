// nvfp4: NVIDIA's NVFP4. packed u8 [E, R, C/2]; scale e4m3 [E, R, C/16]; global f32 [E, R].
// A row is C/2 bytes of E2M1 codes (e2m1.h) and C/16 E4M3 scales; weight = e2m1(code) * e4m3(scale) * global of the
// row. Scales are signed as they stand; 0x7F and 0xFF are NaN. Products are exact integers; error: int16_planes.h's
// rounding of activations, and float32 sums over C/16 blocks.
#pragma once

namespace cpu_moe::CPU_MOE_TIER {

struct Nvfp4 {
  static constexpr int kBlock = 16;
  static constexpr bool kSplitHalves = false;
  static constexpr int kOffset = 0;
  static constexpr float kUnit = kE2m1Unit * 0x1p120f;  // 2^120: see scales()
  static constexpr bool kRescale = true;
  static constexpr bool kWideScale = false;
  static constexpr bool kFastIsQ8_0 = false;
  static constexpr int64_t kGroupBytes = V::kLanes * 8;

  // In double: neither factor order overflows before the product itself does.
  static CPU_MOE_INLINE float finish(const Weight& w, int64_t expert, int32_t r, float sum, double rescale) {
    const float global = read_unaligned<float>(w.row(2, expert, r));
    return static_cast<float>(static_cast<double>(sum) * static_cast<double>(global) * rescale);
  }

  template <bool>
  class Row {
   public:
    Row(const Weight& w, int64_t expert, int64_t r)
        : codes_(w.row(0, expert, r)), scales_(w.row(1, expert, r)), table_(V::table(kTwiceE2m1)) {}

    CPU_MOE_INLINE void weights(int64_t step, V::I16* out) const {
      e2m1_weights(codes_ + step * V::kBytes, table_, out);
    }
    CPU_MOE_INLINE V::F32 scales(int64_t group) {
      return values(V::template load_signed_scale_bytes<kBlock>(scales_ + group * V::kLanes));
    }
    // Group 0's, of which only the blocks under the mask are this row's.
    CPU_MOE_INLINE V::F32 first_scales(V::I32 mask) {
      return values(V::bit_and(V::template load_signed_scale_bytes<kBlock>(scales_), mask));
    }
    CPU_MOE_INLINE void prefetch(int64_t group) const { prefetch_ahead(codes_ + group * kGroupBytes, kGroupBytes); }
    CPU_MOE_INLINE Row tail(const Weight& w, int64_t expert, int64_t groups, int blocks, TailBytes& copy) const {
      Row t(*this);
      t.codes_ =
          copy.codes(codes_ + groups * kGroupBytes, blocks * 8, kGroupBytes, w.row(0, expert, w.rows - 1) - codes_);
      t.scales_ = copy.scales(scales_ + groups * V::kLanes, blocks, w.row(1, expert, w.rows - 1) - scales_);
      return t;
    }
    void absorb(const Row& tail) { largest_ = V::max(largest_, tail.largest_); }
    bool saw_nan() const { return V::max_of(largest_) == 127 << 21; }

   private:
    CPU_MOE_INLINE V::F32 values(V::I32 code) {
      // Sign and magnitude moved to float32's places; the unit's 2^120 makes up for the exponent bias, exactly.
      const V::I32 bits = V::bit_and(V::template shift_left<20>(code), V::set_i32(static_cast<int32_t>(0x87F00000)));
      largest_ = V::max(largest_, V::template shift_left<1>(bits));  // without the sign
      return V::as_f32(bits);
    }

    const uint8_t* codes_;
    const uint8_t* scales_;
    V::Table table_;
    V::I32 largest_ = V::zero_i32();
  };
};

}  // namespace cpu_moe::CPU_MOE_TIER
