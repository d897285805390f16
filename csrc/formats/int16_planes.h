// The skeleton of the 4-bit formats: exact integer dot products with 16-bit activations.
//
// Activations are cut into the format's blocks. A block with amax in [2^e, 2^(e+1)) is stored as q = rint(x *
// 2^(14-e)), an int16, and the scale 2^(e-1); an amax that would round to 32768 takes the next e. So |x - q * 2^(e-14)|
// <= 2^(e-15) <= 2^-15 * amax(block), and every bf16 value down to amax / 2^7 is exact. Where that is too coarse - a
// quarter or more of a block's non-zero values are inexact and below amax / 2^10, that is, an outlier hides its
// neighbours - the token gets a second plane with the remainders, 15 bits further down, and the two results are added:
// the error is then <= 2^-30 * amax.
//
// A weight of the format is an integer w (|w| * 32768 * 16 must fit 31 bits) times its block's scale. A block's
// products are summed in int32, exactly, then converted once and multiplied by (weight scale * activation scale *
// unit).
//
// Layout of a plane's body: int16 q, in steps of 2 * kBytes weights, each step as four vectors in the order in
// which the weights come out of their bytes; then float scales, a slot per block; then, for formats with an offset, one
// int32 vector a step to start the sums from, lane by lane, so that every lane's sum is that of its weights.
#pragma once

namespace cpu_moe::CPU_MOE_TIER {

// The end of a row that fills no whole group is read as a whole one where the expert's rows go on for so long: what
// follows meets activations of zero and a mask over the scales. Only an expert's last rows are copied, as its bytes may
// be the last of a mapping.
class TailBytes {
 public:
  // Where `wanted` bytes can be read of which the first `n` are those at `from`; `after` more bytes follow these.
  const uint8_t* codes(const uint8_t* from, int64_t n, int64_t wanted, int64_t after) {
    return n + after >= wanted ? from : copy(codes_, sizeof codes_, from, n);
  }
  const uint8_t* scales(const uint8_t* from, int64_t n, int64_t after) {
    return n + after >= V::kLanes ? from : copy(scales_, sizeof scales_, from, n);
  }

 private:
  static const uint8_t* copy(uint8_t* to, size_t size, const uint8_t* from, int64_t n) {
    std::memset(to, 0, size);
    std::memcpy(to, from, static_cast<size_t>(n));
    return to;
  }
  uint8_t codes_[V::kLanes * 18];
  uint8_t scales_[V::kLanes];
};

// Masks over a vector of scales: row `n` keeps the first n blocks of a group.
template <int Block>
struct KeepBlocks {
  alignas(64) static constexpr auto kMasks = [] {
    std::array<std::array<int32_t, V::kLanes>, V::kLanes> masks{};
    for (int n = 0; n < V::kLanes; ++n) {
      for (int b = 0; b < n; ++b) masks[n][V::scale_slot(Block, b)] = -1;
    }
    return masks;
  }();
  static CPU_MOE_INLINE V::I32 first(int n) { return V::load_i32(kMasks[n].data()); }
};

template <class Format>
struct Int16Kernel {
  static constexpr int kStreams = 1;
  static constexpr int kTokens = 4;
  static constexpr int rows_at_once(int tokens) { return tokens == 1 ? 4 : 1; }
  static constexpr int kBlock = Format::kBlock;
  static constexpr int kStep = 2 * V::kBytes;    // weights per step: kBytes bytes of nibbles
  static constexpr int kSteps = kBlock / 8;      // steps per group
  static constexpr int kGroup = kStep * kSteps;  // weights per group: kLanes blocks, one vector of scales
  static_assert(kGroup == V::kLanes * kBlock);

  static int64_t padded(int64_t cols) { return round_up(cols, kGroup); }
  static int64_t scale_offset(int64_t cols) { return padded(cols) * 2; }
  static int64_t start_offset(int64_t cols) { return scale_offset(cols) + padded(cols) / kBlock * 4; }
  static int64_t plane_bytes(int64_t cols) {
    const int64_t start_bytes = Format::kOffset != 0 ? padded(cols) / kStep * V::kLanes * 4 : 0;
    return round_up(kPlaneHeaderBytes + std::max(start_offset(cols) + start_bytes, cols * 4), 64);
  }

  // Where element c of a step's kStep elements lies among its four vectors of kBytes / 2.
  static constexpr int position(int c) {
    if constexpr (Format::kSplitHalves) {  // byte j of a block holds elements j (low nibble) and j + 16 (high)
      const int block = c / 32, j = c % 16, high = c % 32 / 16;
      return (2 * (j % 2) + high) * (V::kBytes / 2) + block * 8 + j / 2;
    } else {  // byte j holds elements 2j (low) and 2j + 1 (high)
      return (c % 4) * (V::kBytes / 2) + c / 4;
    }
  }
  static constexpr auto kPosition = [] {
    std::array<uint8_t, kStep> table{};
    for (int c = 0; c < kStep; ++c) table[c] = static_cast<uint8_t>(position(c));
    return table;
  }();

  // Stores one block of integers, its scale and its start value.
  static void put_block(uint8_t* plane, int64_t cols, int64_t block, const int32_t* q, float scale) {
    int16_t* values = reinterpret_cast<int16_t*>(body(plane)) + block * kBlock / kStep * kStep;
    const int first = static_cast<int>(block * kBlock % kStep);
    int32_t* start = reinterpret_cast<int32_t*>(body(plane) + start_offset(cols)) + block * kBlock / kStep * V::kLanes;
    for (int i = 0; i < kBlock; ++i) {
      const int at = kPosition[first + i];
      values[at] = static_cast<int16_t>(q[i]);
      if constexpr (Format::kOffset != 0) start[at % (V::kBytes / 2) / 2] -= Format::kOffset * q[i];
    }
    const int64_t group = block / V::kLanes;
    float* scales = reinterpret_cast<float*>(body(plane) + scale_offset(cols)) + group * V::kLanes;
    scales[V::scale_slot(kBlock, static_cast<int>(block % V::kLanes))] = scale;
  }

  // For formats with kRescale. Weights are at most 2^20, and a row has 2^27 columns at most: sums stay below 2^127. The
  // least weight times its unit is 2^-37, so a block 2^kMostSpan below the largest gives 2^-107, normal numbers; a
  // second plane's are 2^15 less.
  static constexpr int kHeadroom = 80;
  static constexpr int kMostSpan = 150;

  // The exponents of a plane's activation scales, of blocks that are not zero.
  struct ScaleRange {
    int least = 1000, most = -1000;
    void add(int e) {
      least = std::min(least, e);
      most = std::max(most, e);
    }
    void write(PlaneHeader& h) const {
      if constexpr (!Format::kWideScale) return;
      if (least > most) return;  // all zero: no scale can spoil that
      // 2^(code - 127), times the unit, times 2^e: normal after each multiplication.
      constexpr int kUnitExponent = exponent_of(std::bit_cast<uint32_t>(Format::kUnit));
      h.least_code = 1 - kUnitExponent + std::max(0, -least);
      h.most_code = std::min(254, 254 - kUnitExponent - most);
    }
  };

  static int prepare(const float* x, int64_t cols, Precision precision, uint8_t* out) {
    if (!all_finite(x, cols)) return write_raw_plane(x, cols, out);
    uint8_t* planes[2] = {out, out + plane_bytes(cols)};
    PlaneHeader h;
    h.unit = Format::kUnit;
    std::memset(body(out), 0, static_cast<size_t>(plane_bytes(cols) - kPlaneHeaderBytes));
    if constexpr (Format::kFastIsQ8_0) {
      if (precision == Precision::kFast) {
        h.unit = 1.0f;
        std::memcpy(out, &h, sizeof h);
        for (int64_t b = 0; b < cols / kBlock; ++b) put_block_q8_0(out, cols, b, x + b * kBlock);
        return 1;
      }
    }
    if constexpr (Format::kWideScale) {
      // weight scale * activation scale must neither overflow nor vanish before the products do. With all activations
      // below 2 it cannot overflow, so the unit waits for the sums; with larger ones the unit makes the room.
      if (exponent_of(max_magnitude_bits(x, cols)) <= 0) std::swap(h.unit, h.sum_unit);
    }
    int shift = 0;
    if constexpr (Format::kRescale) {
      // Another scale multiplies the result: keep the largest block's sums at 2^kHeadroom, whatever the token's
      // magnitude is, and so those of blocks far below it in float32's range.
      shift = exponent_of(max_magnitude_bits(x, cols)) - kHeadroom;
      h.rescale = std::ldexp(1.0, shift);
    }
    bool second = false;
    ScaleRange range, second_range;
    for (int64_t b = 0; b < cols / kBlock; ++b) {
      const float* values = x + b * kBlock;
      const uint32_t amax = max_magnitude_bits(values, kBlock);
      if (amax == 0) continue;
      const int e = block_exponent(amax);
      float scaled[kBlock];
      int32_t q[kBlock];
      const bool hides = quantize(values, e, scaled, q);
      put_block(out, cols, b, q, scale_of(e - 1 - shift));
      range.add(e - 1);
      second |= hides;
    }
    if (Format::kRescale && range.most - range.least > kMostSpan) return write_raw_plane(x, cols, out);
    range.write(h);
    std::memcpy(out, &h, sizeof h);
    if (!second) return 1;
    std::memset(planes[1], 0, static_cast<size_t>(plane_bytes(cols)));
    for (int64_t b = 0; b < cols / kBlock; ++b) {
      const float* values = x + b * kBlock;
      const uint32_t amax = max_magnitude_bits(values, kBlock);
      if (amax == 0) continue;
      const int e = block_exponent(amax);
      float scaled[kBlock];
      int32_t q[kBlock];
      quantize(values, e, scaled, q);
      for (int i = 0; i < kBlock; ++i) q[i] = static_cast<int32_t>((scaled[i] - static_cast<float>(q[i])) * 32768.0f);
      put_block(planes[1], cols, b, q, scale_of(e - 16 - shift));
      second_range.add(e - 16);
    }
    second_range.write(h);
    std::memcpy(planes[1], &h, sizeof h);
    return 2;
  }

  // ggml's Q8_0: d = amax / 127 kept as f16, q = round(x / d) with the unrounded d. Where d does not fit f16, ggml's
  // result is infinite; here it stays float32.
  static void put_block_q8_0(uint8_t* plane, int64_t cols, int64_t block, const float* x) {
    const float amax = std::bit_cast<float>(max_magnitude_bits(x, kBlock));
    const float d = amax / 127.0f;
    const float inverse = d != 0.0f ? 1.0f / d : 0.0f;
    int32_t q[kBlock];
    for (int i = 0; i < kBlock; ++i) {
      // A subnormal d has no finite inverse.
      const float ratio = std::isfinite(inverse) ? x[i] * inverse : x[i] / d;
      q[i] = static_cast<int32_t>(std::round(ratio));
    }
    put_block(plane, cols, block, q, d <= 65504.0f ? f16_to_f32(f32_to_f16(d)) : d);
  }

  // The e of the layout's description, for a block's largest magnitude (as bits, not 0).
  static int block_exponent(uint32_t amax) {
    const int e = std::max(exponent_of(amax), -148);
    const int first = std::min(14 - e, 100);
    const float scaled = std::bit_cast<float>(amax) * exp2_float(first) * exp2_float(14 - e - first);
    return scaled >= 32767.5f ? e + 1 : e;
  }

  static float scale_of(int e) {
    return e < -149 ? 0.0f : e > 127 ? std::numeric_limits<float>::infinity() : exp2_float(e);
  }

  // scaled = x * 2^(14-e), q = rint(scaled). True when a quarter of the non-zero values are small
  // and inexact.
  static bool quantize(const float* x, int e, float* scaled, int32_t* q) {
    const int first = std::min(14 - e, 100);  // 2^(14-e) itself may be out of range
    const auto m1 = V::set(exp2_float(first)), m2 = V::set(exp2_float(14 - e - first));
    int small = 0, nonzero = 0;
    for (int i = 0; i < kBlock; i += V::kLanes) {
      const auto y = V::mul(V::mul(V::load(x + i), m1), m2);
      V::store(scaled + i, y);
      V::store_i32(q + i, V::round_i32(y));
    }
    for (int i = 0; i < kBlock; ++i) {
      const float magnitude = std::fabs(scaled[i]);
      nonzero += magnitude != 0.0f;
      small += (magnitude < 16.0f) & (scaled[i] != static_cast<float>(q[i]));
    }
    return small * 4 >= nonzero && small > 0;
  }

  template <int N>
  struct Tokens {
    const int16_t* q[N];
    const float* scale[N];
    const int32_t* start[N];
    V::F32 unit[N];
    const PlaneHeader* header[N];
    Tokens(int64_t cols, const uint8_t* const* planes) {
      for (int n = 0; n < N; ++n) {
        q[n] = reinterpret_cast<const int16_t*>(body(planes[n]));
        scale[n] = reinterpret_cast<const float*>(body(planes[n]) + scale_offset(cols));
        start[n] = reinterpret_cast<const int32_t*>(body(planes[n]) + start_offset(cols));
        header[n] = reinterpret_cast<const PlaneHeader*>(planes[n]);
        unit[n] = V::set(header[n]->unit * header[n]->sum_unit);
      }
    }
  };

  // Several rows finish together: that sums their lanes, and looks for seldom scales, once for all of them.
  template <int N, int R>
  static CPU_MOE_INLINE void dot(const Weight& w, int64_t expert, const int32_t* rows, const Tokens<N>& tokens,
                                 float* out, int64_t out_stride) {
    if constexpr (R == 1) {
      dot_row<N, false>(w, expert, rows[0], tokens, out, out_stride);
    } else {
      static_assert(R == 4 && N == 1);
      V::F32 sums[R];
      double unused = 0;
      auto all = pass<N, false>(w, expert, rows[0], tokens, sums, unused);
      for (int i = 1; i < R; ++i) all.absorb(pass<N, false>(w, expert, rows[i], tokens, sums + i, unused));
      if (!ordinary(all, tokens.header[0])) [[unlikely]] {
        for (int i = 0; i < R; ++i) dot_row<N, false>(w, expert, rows[i], tokens, out + i, out_stride);
        return;
      }
      float totals[R];
      V::sum_each(sums, totals);
      for (int i = 0; i < R; ++i) {
        out[i] = Format::finish(w, expert, rows[i], totals[i], tokens.header[0]->rescale);
      }
    }
  }

  // Where products of scales leave float32's range though the result may not. Seldom needed, so out of the way, and for
  // the token that needs it alone: what it gets must not depend on the others.
  [[gnu::noinline, gnu::cold]] static void dot_careful(const Weight& w, int64_t expert, int32_t row,
                                                       const PlaneHeader* plane, float* out) {
    const uint8_t* const planes[1] = {reinterpret_cast<const uint8_t*>(plane)};
    dot_row<1, true>(w, expert, row, Tokens<1>(w.cols, planes), out, 1);
  }

  template <int N, bool Careful>
  static CPU_MOE_INLINE void dot_row(const Weight& w, int64_t expert, int32_t r, const Tokens<N>& tokens, float* out,
                                     int64_t out_stride) {
    V::F32 sum[N];
    double careful_sum = 0;
    const auto row = pass<N, Careful>(w, expert, r, tokens, sum, careful_sum);
    const bool nan = row.saw_nan();
    for (int n = 0; n < N; ++n) {
      const float total = Careful ? static_cast<float>(careful_sum) : V::sum(sum[n]);
      const float result = Format::finish(w, expert, r, total, tokens.header[n]->rescale);
      out[n * out_stride] = nan ? std::numeric_limits<float>::quiet_NaN() : result;
    }
    if constexpr (Format::kWideScale && !Careful) {
      for (int n = 0; n < N; ++n) {
        if (out_of_range(row, tokens.header[n])) dot_careful(w, expert, r, tokens.header[n], out + n * out_stride);
      }
    }
  }

  // A row's sums, lane by lane and not yet finished; returns the row for what it saw of its scales.
  template <int N, bool Careful>
  static CPU_MOE_INLINE auto pass(const Weight& w, int64_t expert, int32_t r, const Tokens<N>& tokens, V::F32* sum,
                                  double& careful_sum) {
    using Row = typename Format::template Row<Careful>;
    const int64_t groups = w.cols / kGroup;
    const int rest = static_cast<int>(w.cols % kGroup);
    Row row(w, expert, r);
    for (int n = 0; n < N; ++n) sum[n] = V::zero();
    for (int64_t g = 0; g < groups; ++g) {
      row.prefetch(g);
      group<N, Careful>(row, g, row.scales(g), tokens, g, kSteps, sum, careful_sum);
    }
    if (rest != 0) {
      TailBytes bytes;
      Row tail = row.tail(w, expert, groups, rest / kBlock, bytes);
      const V::F32 scales = tail.first_scales(KeepBlocks<kBlock>::first(rest / kBlock));
      group<N, Careful>(tail, 0, scales, tokens, groups, (rest + kStep - 1) / kStep, sum, careful_sum);
      row.absorb(tail);
    }
    return row;
  }

  template <class Row>
  static CPU_MOE_INLINE bool out_of_range(const Row& row, const PlaneHeader* plane) {
    return row.least_code() < plane->least_code || row.most_code() > plane->most_code;
  }
  template <class Row>
  static CPU_MOE_INLINE bool ordinary(const Row& row, const PlaneHeader* plane) {
    if constexpr (Format::kWideScale) return !out_of_range(row, plane);
    return !row.saw_nan();
  }

  // The first `count` steps of group g of the activations with group `at` of the row and its scales.
  template <int N, bool Careful, class Row>
  static CPU_MOE_INLINE void group(const Row& row, int64_t at, V::F32 weight_scale, const Tokens<N>& tokens, int64_t g,
                                   int count, V::F32* sum, double& careful_sum) {
    V::F32 scales[N];
    for (int n = 0; n < N; ++n) {
      const V::F32 activation_scale = V::load(tokens.scale[n] + g * V::kLanes);
      if constexpr (Careful) {
        careful_steps<0>(row, at, tokens, weight_scale, activation_scale, g, count, careful_sum);
      } else {
        scales[n] = V::mul(V::mul(weight_scale, tokens.unit[n]), activation_scale);
      }
    }
    if constexpr (!Careful) steps<N, 0>(row, at, tokens, scales, g, count, sum);
  }

  // The integer sums of step `step` for token n, lane by lane.
  template <int N>
  static CPU_MOE_INLINE V::I32 dots(const V::I16* weights, const Tokens<N>& tokens, int n, int64_t step) {
    const V::I32 start = Format::kOffset != 0 ? V::load_i32(tokens.start[n] + step * V::kLanes) : V::zero_i32();
    return V::dot4_add(start, weights, tokens.q[n] + step * kStep);
  }

  // One token's steps in double, whose range holds every product of two scales and a sum.
  template <int K, class Row>
  static CPU_MOE_INLINE void careful_steps(const Row& row, int64_t at, const Tokens<1>& tokens, V::F32 weight_scale,
                                           V::F32 activation_scale, int64_t g, int count, double& sum) {
    if constexpr (K < kSteps) {
      if (K == count) return;
      V::I16 weights[4];
      row.weights(at * kSteps + K, weights);
      int32_t lanes[V::kLanes];
      V::store_i32(lanes, dots<1>(weights, tokens, 0, g * kSteps + K));
      float of_weights[V::kLanes], of_activations[V::kLanes];
      V::store(of_weights, V::template spread<kBlock, K>(weight_scale));
      V::store(of_activations, V::template spread<kBlock, K>(activation_scale));
      const double unit = static_cast<double>(tokens.header[0]->unit) * static_cast<double>(tokens.header[0]->sum_unit);
      for (int i = 0; i < V::kLanes; ++i) {
        sum += lanes[i] * unit * static_cast<double>(of_weights[i]) * static_cast<double>(of_activations[i]);
      }
      careful_steps<K + 1>(row, at, tokens, weight_scale, activation_scale, g, count, sum);
    }
  }

  template <int N, int K, class Row>
  static CPU_MOE_INLINE void steps(const Row& row, int64_t at, const Tokens<N>& tokens, const V::F32* scales, int64_t g,
                                   int count, V::F32* sum) {
    if constexpr (K < kSteps) {
      if (K == count) return;
      const int64_t step = g * kSteps + K;
      V::I16 weights[4];
      row.weights(at * kSteps + K, weights);
      for (int n = 0; n < N; ++n) {
        const V::F32 products = V::to_f32(dots<N>(weights, tokens, n, step));
        sum[n] = V::fma(products, V::template spread<kBlock, K>(scales[n]), sum[n]);
      }
      steps<N, K + 1>(row, at, tokens, scales, g, count, sum);
    }
  }
};

}  // namespace cpu_moe::CPU_MOE_TIER
