// mxfp4: OCP Microscaling MXFP4. packed u8 [E, R, C/2], scale u8 (E8M0) [E, R, C/32].
// A row is C/2 bytes of E2M1 codes (e2m1.h) and C/32 bytes of scales; weight = e2m1(code) * 2^(scale - 127), scale 255
// is NaN. Products are exact integers; error: int16_planes.h's rounding of activations, and float32 sums over C/32
// blocks.
#pragma once

namespace cpu_moe::CPU_MOE_TIER {

struct Mxfp4 {
  static constexpr int kBlock = 32;
  static constexpr bool kSplitHalves = false;
  static constexpr int kOffset = 0;
  static constexpr float kUnit = kE2m1Unit;
  static constexpr bool kRescale = false;
  static constexpr bool kWideScale = true;  // E8M0 fills float32's range
  static constexpr bool kFastIsQ8_0 = false;
  static constexpr int64_t kGroupBytes = V::kLanes * 16;

  static CPU_MOE_INLINE float finish(const Weight&, int64_t, int32_t, float sum, double) { return sum; }

  // Careful: scales at the ends of E8M0's range are right too (see int16_planes.h).
  template <bool Careful>
  class Row {
   public:
    Row(const Weight& w, int64_t expert, int64_t r)
        : codes_(w.row(0, expert, r)), scales_(w.row(1, expert, r)), table_(V::table(kTwiceE2m1)) {}

    CPU_MOE_INLINE void weights(int64_t step, V::I16* out) const {
      e2m1_weights(codes_ + step * V::kBytes, table_, out);
    }
    CPU_MOE_INLINE V::F32 scales(int64_t group) {
      const V::I32 code = V::template load_scale_bytes<kBlock>(scales_ + group * V::kLanes);
      most_ = V::max(most_, code);
      least_ = V::min(least_, code);
      return values(code);
    }
    // Group 0's, of which only the blocks under the mask are this row's.
    CPU_MOE_INLINE V::F32 first_scales(V::I32 mask) {
      const V::I32 code = V::bit_and(V::template load_scale_bytes<kBlock>(scales_), mask);
      const V::I32 none = V::set_i32(255);
      most_ = V::max(most_, code);
      least_ = V::min(least_, V::add(code, V::sub(none, V::bit_and(none, mask))));
      return values(code);
    }
    int least_code() const { return -V::max_of(V::sub(V::zero_i32(), least_)); }
    int most_code() const { return V::max_of(most_); }
    CPU_MOE_INLINE void prefetch(int64_t group) const { prefetch_ahead(codes_ + group * kGroupBytes, kGroupBytes); }
    // From group `groups` on, of which `blocks` are this row's.
    CPU_MOE_INLINE Row tail(const Weight& w, int64_t expert, int64_t groups, int blocks, TailBytes& copy) const {
      Row t(*this);
      t.codes_ =
          copy.codes(codes_ + groups * kGroupBytes, blocks * 16, kGroupBytes, w.row(0, expert, w.rows - 1) - codes_);
      t.scales_ = copy.scales(scales_ + groups * V::kLanes, blocks, w.row(1, expert, w.rows - 1) - scales_);
      return t;
    }
    void absorb(const Row& tail) {
      most_ = V::max(most_, tail.most_);
      least_ = V::min(least_, tail.least_);
    }
    bool saw_nan() const { return Careful && most_code() == 255; }

   private:
    // The code is float32's exponent field; 0 stands for the subnormal 2^-127.
    static CPU_MOE_INLINE V::F32 values(V::I32 code) {
      const V::I32 bits = V::template shift_left<23>(code);
      if constexpr (!Careful) return V::as_f32(bits);
      return V::as_f32(V::max(bits, V::set_i32(0x00400000)));
    }

    const uint8_t* codes_;
    const uint8_t* scales_;
    V::Table table_;
    V::I32 most_ = V::zero_i32();
    V::I32 least_ = V::set_i32(255);
  };
};

}  // namespace cpu_moe::CPU_MOE_TIER
