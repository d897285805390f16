// q4_0: GGUF Q4_0. u8 [E, R, C/32*18]: blocks of 18 bytes, f16 d then 16 bytes; byte j holds elements j (low nibble)
// and j + 16 (high nibble); weight = (nibble - 8) * d. The sums start from -8 * (sum of the block's activations), so
// nibbles enter as they are, unsigned. Products are exact integers; error: int16_planes.h's rounding of activations,
// and float32 sums over C/32 blocks.
#pragma once

namespace cpu_moe::CPU_MOE_TIER {

struct Q4_0 {
  static constexpr int kBlock = 32;
  static constexpr bool kSplitHalves = true;
  static constexpr int kOffset = 8;
  // |sum| <= 8 * 32768 * 8 products a lane < 2^24; activations q * 2^(e-14) are held as scale 2^(e-1).
  static constexpr float kUnit = 0x1p-13f;
  static constexpr bool kRescale = true;  // f16 scales times small activations would leave float32's range
  static constexpr bool kWideScale = false;
  static constexpr bool kFastIsQ8_0 = true;
  static constexpr int64_t kBlockBytes = 18;
  static constexpr int64_t kGroupBytes = V::kLanes * kBlockBytes;

  static CPU_MOE_INLINE float finish(const Weight&, int64_t, int32_t, float sum, double rescale) {
    return static_cast<float>(static_cast<double>(sum) * rescale);
  }

  template <bool>
  class Row {
   public:
    Row(const Weight& w, int64_t expert, int64_t r) : blocks_(w.row(0, expert, r)) {}

    CPU_MOE_INLINE void weights(int64_t step, V::I16* out) const {
      const V::Bytes bytes = V::load_blocks(blocks_ + step * (V::kBytes / 16) * kBlockBytes + 2, kBlockBytes);
      out[0] = V::template nibble<0>(bytes);
      out[1] = V::template nibble<1>(bytes);
      out[2] = V::template nibble<2>(bytes);
      out[3] = V::template nibble<3>(bytes);
    }
    CPU_MOE_INLINE V::F32 scales(int64_t group) const {
      return V::template gather_f16_scales<kBlock>(blocks_ + group * kGroupBytes, kBlockBytes);
    }
    // Group 0's, of which only the blocks under the mask are this row's.
    CPU_MOE_INLINE V::F32 first_scales(V::I32 mask) const { return V::as_f32(V::bit_and(V::as_i32(scales(0)), mask)); }
    CPU_MOE_INLINE void prefetch(int64_t group) const { prefetch_ahead(blocks_ + group * kGroupBytes, kGroupBytes); }
    CPU_MOE_INLINE Row tail(const Weight& w, int64_t expert, int64_t groups, int blocks, TailBytes& copy) const {
      Row t(*this);
      t.blocks_ = copy.codes(blocks_ + groups * kGroupBytes, blocks * kBlockBytes, kGroupBytes,
                             w.row(0, expert, w.rows - 1) - blocks_);
      return t;
    }
    void absorb(const Row&) {}
    bool saw_nan() const { return false; }  // an f16 NaN comes through the arithmetic

   private:
    const uint8_t* blocks_;
  };
};

}  // namespace cpu_moe::CPU_MOE_TIER
