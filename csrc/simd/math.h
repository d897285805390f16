// exp and the gated activations over the tier's vocabulary.
#pragma once

namespace cpu_moe::CPU_MOE_TIER {

// e^x to about 1 ulp: x = n ln2 + r, |r| <= ln2 / 2, a degree-6 polynomial (minimax coefficients as in Cephes' expf),
// then 2^n in two factors so that results near both ends of the range come out right. NaN stays, overflow gives
// infinity.
CPU_MOE_INLINE V::F32 exp_f32(V::F32 x) {
  x = V::max_keep_nan(V::set(-110.0f), V::min_keep_nan(V::set(100.0f), x));
  const V::I32 n = V::round_i32(V::mul(x, V::set(1.44269504088896341f)));
  const V::F32 nf = V::to_f32(n);
  // A NaN's n is INT32_MIN; its r is NaN all the same.
  V::F32 r = V::fma(nf, V::set(-0.693359375f), x);
  r = V::fma(nf, V::set(2.12194440e-4f), r);
  V::F32 p = V::set(1.9875691500e-4f);
  p = V::fma(p, r, V::set(1.3981999507e-3f));
  p = V::fma(p, r, V::set(8.3334519073e-3f));
  p = V::fma(p, r, V::set(4.1665795894e-2f));
  p = V::fma(p, r, V::set(1.6666665459e-1f));
  p = V::fma(p, r, V::set(5.0000001201e-1f));
  p = V::add(V::fma(p, V::mul(r, r), r), V::set(1.0f));
  const V::I32 bounded = V::max(V::set_i32(-200), V::min(n, V::set_i32(200)));
  const V::I32 half = V::template shift_right<1>(bounded);
  const V::I32 bias = V::set_i32(127);
  const V::I32 other = V::sub(bounded, half);
  p = V::mul(p, V::as_f32(V::template shift_left<23>(V::add(half, bias))));
  return V::mul(p, V::as_f32(V::template shift_left<23>(V::add(other, bias))));
}

// x * sigmoid(scale * x), as x / (1 + exp(-scale * x)): no product of 0 and infinity for a finite x.
CPU_MOE_INLINE V::F32 swish(V::F32 x, V::F32 scale) {
  const V::F32 e = exp_f32(V::mul(V::sub(V::zero(), scale), x));
  return V::div(x, V::add(V::set(1.0f), e));
}

template <Activation A>
CPU_MOE_INLINE V::F32 gated(V::F32 gate, V::F32 up, V::F32 alpha, V::F32 limit) {
  if constexpr (A == Activation::kSilu) {
    return V::mul(swish(gate, V::set(1.0f)), up);
  } else if constexpr (A == Activation::kGeluTanh) {
    // 0.5 x (1 + tanh(u)) = x sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3)
    const V::F32 cubic = V::fma(V::mul(gate, gate), V::set(0.044715f), V::set(1.0f));
    return V::mul(swish(gate, V::mul(cubic, V::set(1.5957691216057308f))), up);
  } else if constexpr (A == Activation::kRelu2) {
    const V::F32 positive = V::max_keep_nan(V::zero(), gate);
    return V::mul(V::mul(positive, up), positive);  // the square alone may overflow
  } else {
    const V::F32 g = V::min_keep_nan(limit, gate);
    const V::F32 u = V::max_keep_nan(V::sub(V::zero(), limit), V::min_keep_nan(limit, up));
    if constexpr (A == Activation::kSwigluOai) return V::mul(swish(g, alpha), V::add(u, V::set(1.0f)));
    return V::mul(swish(g, V::set(1.0f)), u);
  }
}

template <Activation A>
inline void glu_as(float alpha, float limit, const float* gate, const float* up, int64_t n, float* out) {
  const V::F32 a = V::set(alpha), l = V::set(limit);
  int64_t i = 0;
  for (; i + V::kLanes <= n; i += V::kLanes) V::store(out + i, gated<A>(V::load(gate + i), V::load(up + i), a, l));
  if (i < n) {
    float g[V::kLanes] = {}, u[V::kLanes] = {}, y[V::kLanes];
    std::memcpy(g, gate + i, static_cast<size_t>(n - i) * sizeof(float));
    std::memcpy(u, up + i, static_cast<size_t>(n - i) * sizeof(float));
    V::store(y, gated<A>(V::load(g), V::load(u), a, l));
    std::memcpy(out + i, y, static_cast<size_t>(n - i) * sizeof(float));
  }
}

inline void glu(Activation activation, float alpha, float limit, const float* gate, const float* up, int64_t n,
                float* out) {
  switch (activation) {
    case Activation::kSilu:
      return glu_as<Activation::kSilu>(alpha, limit, gate, up, n, out);
    case Activation::kGelu:
      // erfc keeps the relative accuracy of the left tail, where 1 + erf cancels
      for (int64_t i = 0; i < n; ++i) {
        out[i] = 0.5f * gate[i] * std::erfc(-0.70710678118654752f * gate[i]) * up[i];
      }
      return;
    case Activation::kGeluTanh:
      return glu_as<Activation::kGeluTanh>(alpha, limit, gate, up, n, out);
    case Activation::kRelu2:
      return glu_as<Activation::kRelu2>(alpha, limit, gate, up, n, out);
    case Activation::kSwigluOai:
      return glu_as<Activation::kSwigluOai>(alpha, limit, gate, up, n, out);
    case Activation::kSwigluClamp:
      return glu_as<Activation::kSwigluClamp>(alpha, limit, gate, up, n, out);
  }
}

}  // namespace cpu_moe::CPU_MOE_TIER
