// What is no matter of formats: gated activations, sums of experts, conversions, the plain read.
#include <algorithm>
#include <cfloat>

#include "kernel_matrix.h"
#include "kernel_report.h"

namespace matrix {
namespace {

using cpu_moe::Activation;

// Copies of arrays of floats, each before a forbidden page or behind one.
class Floats {
 public:
  float* operator()(const float* values, int64_t n, Side side) {
    auto* copy = reinterpret_cast<float*>(arenas_[next_++ % std::size(arenas_)].take(static_cast<size_t>(n) * 4, side));
    if (values != nullptr && n > 0) std::memcpy(copy, values, static_cast<size_t>(n) * sizeof(float));
    return copy;
  }

 private:
  guarded::Arena arenas_[16];
  size_t next_ = 0;
};

struct Gated {
  double value, bound;
};

// act(gate) * up and the bound of tests/reference.py's activate().
Gated gated(Activation activation, double alpha, double limit, double gate, double up) {
  if (activation == Activation::kSwigluOai || activation == Activation::kSwigluClamp) {
    if (gate > limit) gate = limit;
    if (up > limit) up = limit;
    if (up < -limit) up = -limit;
  }
  if (activation == Activation::kSwigluOai) up += 1;
  double f = 0;
  const auto swish = [](double x, double scale) { return x / (1 + std::exp(-scale * x)); };
  switch (activation) {
    case Activation::kSilu:
    case Activation::kSwigluClamp:
      f = swish(gate, 1);
      break;
    case Activation::kSwigluOai:
      f = swish(gate, alpha);
      break;
    case Activation::kGelu:
      f = 0.5 * gate * std::erfc(-gate / std::sqrt(2.0));
      break;
    case Activation::kGeluTanh:
      f = swish(gate, 2 * std::sqrt(2 / std::acos(-1.0)) * (1 + 0.044715 * gate * gate));
      break;
    case Activation::kRelu2:
      f = gate > 0 || std::isnan(gate) ? gate * gate : 0;
      break;
  }
  const bool cancels = activation == Activation::kGelu || activation == Activation::kGeluTanh;
  double own = 0x1p-20 * std::fabs(f) + 1e-36 + (cancels ? 0x1p-22 * std::fabs(gate) : 0);
  // alpha * gate is rounded, and exp magnifies that (where the layer's tests have the gate's own error, far larger).
  if (activation == Activation::kSwigluOai) own += 2 * reference::kHalfUlp * std::fabs(alpha * gate * f);
  const double value = f * up;
  return {value, own * std::fabs(up) + 0x1p-22 * std::fabs(value) * 2 + 1e-37 + 0x1p-148};
}

void check_glu(const RunningTier& tier) {
  constexpr struct {
    const char* name;
    Activation activation;
    float alpha, limit;
  } kCases[] = {
      {"silu", Activation::kSilu, 1.702f, HUGE_VALF},
      {"gelu", Activation::kGelu, 1.702f, HUGE_VALF},
      {"gelu_tanh", Activation::kGeluTanh, 1.702f, HUGE_VALF},
      {"relu2", Activation::kRelu2, 1.702f, HUGE_VALF},
      {"swigluoai", Activation::kSwigluOai, 1.702f, HUGE_VALF},
      {"swigluoai", Activation::kSwigluOai, 1.702f, 7.0f},
      {"swigluoai", Activation::kSwigluOai, 1.0f, 10.0f},
      {"swiglu_clamp", Activation::kSwigluClamp, 1.702f, HUGE_VALF},
      {"swiglu_clamp", Activation::kSwigluClamp, 1.702f, 7.0f},
  };
  Floats floats;
  Random random(9);
  for (const auto& c : kCases) {
    std::vector<float> gates, ups;
    const auto add = [&](double gate, double up) {
      gates.push_back(static_cast<float>(gate));
      ups.push_back(static_cast<float>(up));
    };
    for (int i = -1000; i <= 1000; ++i) add(i / 10.0, 1);
    for (int i = -400; i <= 400; ++i) add(i / 200.0, random.normal());
    for (const double gate : {-1e30, -1e4, -87.0, -0.0, 0.0, 1e-20, 1e-40, 6.9, 7.1, 1e4, 1e18}) {
      for (const double up : {-20.0, -7.5, -1.0, 0.0, 1e-30, 1.0, 7.1, 1e15}) add(gate, up);
    }
    for (const double special : {std::nan(""), static_cast<double>(HUGE_VALF)}) {
      add(special, 2);
      add(2, special);
    }
    begin(tier.name, "glu",
          text("%s, alpha %g, limit %g", c.name, static_cast<double>(c.alpha), static_cast<double>(c.limit)));
    const auto n = static_cast<int64_t>(gates.size());
    std::vector<float> all(gates.size());
    tier.kernels.glu(c.activation, c.alpha, c.limit, gates.data(), ups.data(), n, all.data());
    for (size_t i = 0; i < gates.size(); ++i) {
      const auto gate = static_cast<double>(gates[i]), up = static_cast<double>(ups[i]);
      const Gated want = gated(c.activation, static_cast<double>(c.alpha), static_cast<double>(c.limit), gate, up);
      if (std::fabs(want.value) + want.bound > static_cast<double>(FLT_MAX) && std::isfinite(want.value)) continue;
      expect(static_cast<double>(all[i]), want.value, want.bound, text("gate %.9g, up %.9g", gate, up));
    }
    // Where in a call a value stands, and whether in its tail, changes nothing.
    for (int64_t length = 0; length <= 70; ++length) {
      for (const Side side : {Side::kStart, Side::kEnd}) {
        const int64_t first = random.below(n - length);
        const float* gate = floats(&gates[static_cast<size_t>(first)], length, side);
        const float* up = floats(&ups[static_cast<size_t>(first)], length, side);
        float* out = floats(nullptr, length, side);
        tier.kernels.glu(c.activation, c.alpha, c.limit, gate, up, length, out);
        for (int64_t i = 0; i < length; ++i) {
          const float whole = all[static_cast<size_t>(first + i)];
          if (failed(same_bits(out[i], whole))) {
            fail(text("gate %.9g, up %.9g at %d of %d: %.9g, elsewhere %.9g", static_cast<double>(gate[i]),
                      static_cast<double>(up[i]), static_cast<int>(i), static_cast<int>(length),
                      static_cast<double>(out[i]), static_cast<double>(whole)));
          }
        }
      }
    }
  }
}

void check_combine(const RunningTier& tier) {
  Floats floats;
  Random random(10);
  for (int64_t n = 0; n <= 70; ++n) {
    for (const int64_t count : {0, 1, 2, 8, 13}) {
      for (const Side side : {Side::kStart, Side::kEnd}) {
        begin(tier.name, "combine", text("%d parts of %d", static_cast<int>(count), static_cast<int>(n)));
        std::vector<const float*> parts;
        std::vector<float> weights;
        for (int64_t s = 0; s < count; ++s) {
          std::vector<float> values;
          for (int64_t i = 0; i < n; ++i) values.push_back(static_cast<float>(random.normal()));
          parts.push_back(floats(values.data(), n, side));
          weights.push_back(static_cast<float>(random.uniform() - 0.2));
        }
        float* out = floats(nullptr, n, side);
        tier.kernels.combine(parts.data(), weights.data(), count, n, out);
        for (int64_t i = 0; i < n; ++i) {
          double want = 0, size = 0;
          for (int64_t s = 0; s < count; ++s) {
            const double product = static_cast<double>(parts[static_cast<size_t>(s)][i]) *
                                   static_cast<double>(weights[static_cast<size_t>(s)]);
            want += product;
            size += std::fabs(product);
          }
          expect(static_cast<double>(out[i]), want, (static_cast<double>(count) + 3) * reference::kHalfUlp * size,
                 text("element %d", static_cast<int>(i)));
        }
        // An element by itself has the same bits.
        for (int64_t i = 0; i < n; i += 1 + n / 7) {
          std::vector<const float*> one;
          for (const float* part : parts) one.push_back(part + i);
          float value;
          tier.kernels.combine(one.data(), weights.data(), count, 1, &value);
          if (failed(same_bits(value, out[i]))) fail(text("element %d has other bits alone", static_cast<int>(i)));
        }
      }
    }
  }
}

void check_load_and_store(const RunningTier& tier) {
  constexpr struct {
    const char* name;
    DType dtype;
    double (*decode)(uint32_t);
    double (*round)(double);
  } kTypes[] = {
      {"f32", DType::kF32, banks::f32, nullptr},
      {"f16", DType::kF16, reference::f16, reference::round_f16},
      {"bf16", DType::kBF16, reference::bf16, reference::round_bf16},
  };
  guarded::Arena in, out;
  Random random(11);
  for (const auto& type : kTypes) {
    const int64_t size = cpu_moe::size_of(type.dtype);
    begin(tier.name, "load", text("%s: every code", type.name));
    std::vector<uint8_t> codes;
    for (uint32_t i = 0; i < 65536; ++i) {
      const uint32_t code = size == 2 ? i : static_cast<uint32_t>(random.bits());
      const auto* bytes = reinterpret_cast<const uint8_t*>(&code);
      codes.insert(codes.end(), bytes, bytes + size);
    }
    std::vector<float> values(65536);
    tier.kernels.load(type.dtype, codes.data(), 65536, values.data());
    for (size_t i = 0; i < 65536; ++i) {
      uint32_t code = 0;
      std::memcpy(&code, &codes[i * static_cast<size_t>(size)], static_cast<size_t>(size));
      expect(static_cast<double>(values[i]), type.decode(code), 0, text("code 0x%x", code));
    }
    // What store() must round: everything near a code, and floats of any bits.
    for (size_t i = 0; i < 65536; ++i) {
      if (i % 2 != 0) {
        values[i] = std::bit_cast<float>(static_cast<uint32_t>(random.bits()));
      } else if (std::isfinite(values[i])) {
        auto step = static_cast<uint32_t>(random.below(3)) * 0x1000u - 1;
        step += static_cast<uint32_t>(random.below(3));
        values[i] = std::bit_cast<float>(std::bit_cast<uint32_t>(values[i]) + step);
      }
    }
    std::vector<uint8_t> stored(codes.size());
    begin(tier.name, "store", type.name);
    tier.kernels.store(type.dtype, values.data(), 65536, stored.data());
    for (size_t i = 0; i < 65536; ++i) {
      uint32_t code = 0;
      std::memcpy(&code, &stored[i * static_cast<size_t>(size)], static_cast<size_t>(size));
      const auto value = static_cast<double>(values[i]);
      expect(type.decode(code), type.round == nullptr ? value : type.round(value), 0, text("%.9g", value));
    }
    for (int64_t n = 0; n <= 70; ++n) {
      for (const Side side : {Side::kStart, Side::kEnd}) {
        for (size_t shift = 0; shift < 2; ++shift) {  // odd addresses too
          begin(tier.name, "load", text("%s: %d", type.name, static_cast<int>(n)));
          const int64_t first = random.below(65000);
          uint8_t* from = in.take(static_cast<size_t>(n * size), side, shift);
          if (n > 0) std::memcpy(from, &codes[static_cast<size_t>(first * size)], static_cast<size_t>(n * size));
          auto* to = reinterpret_cast<float*>(out.take(static_cast<size_t>(n) * sizeof(float), side));
          tier.kernels.load(type.dtype, from, n, to);
          for (int64_t i = 0; i < n; ++i) {
            uint32_t code = 0;
            std::memcpy(&code, from + i * size, static_cast<size_t>(size));
            expect(static_cast<double>(to[i]), type.decode(code), 0, text("code 0x%x", code));
          }
          begin(tier.name, "store", text("%s: %d", type.name, static_cast<int>(n)));
          auto* floats = reinterpret_cast<float*>(in.take(static_cast<size_t>(n) * sizeof(float), side));
          if (n > 0) std::memcpy(floats, &values[static_cast<size_t>(first)], static_cast<size_t>(n) * sizeof(float));
          uint8_t* bytes = out.take(static_cast<size_t>(n * size), side, shift);
          tier.kernels.store(type.dtype, floats, n, bytes);
          for (int64_t i = 0; i < n; ++i) {
            uint32_t code = 0;
            std::memcpy(&code, bytes + i * size, static_cast<size_t>(size));
            const auto value = static_cast<double>(floats[i]);
            expect(type.decode(code), type.round == nullptr ? value : type.round(value), 0, text("%.9g", value));
          }
        }
      }
    }
  }
}

void check_stream_read(const RunningTier& tier) {
  guarded::Arena arena;
  Random random(12);
  for (int variant = 0; variant < cpu_moe::kStreamReadVariants; ++variant) {
    for (int64_t n : {0, 1, 3, 63, 64, 65, 255, 257, 1023, 4097, 20011}) {
      for (const Side side : {Side::kStart, Side::kEnd}) {
        begin(tier.name, "stream_read", text("variant %d, %d bytes", variant, static_cast<int>(n)));
        uint8_t* data = arena.take(static_cast<size_t>(n), side);
        for (int64_t i = 0; i < n; ++i) data[i] = static_cast<uint8_t>(random.bits());
        // Its low 32 bits are the sum of the words of each of the ranges that it reads side by side; all of them are
        // whole but the last. As a sum of bytes times their place in a word, with 4-byte ranges this is that of all.
        const auto total = static_cast<uint32_t>(tier.kernels.stream_read(data, n, variant));
        uint32_t want = 0;
        for (int64_t i = 0; i < n; ++i) want += static_cast<uint32_t>(data[i]) << (i % 4 * 8);
        if (failed(total == want)) fail(text("got the sum %u, expected %u", total, want));
      }
    }
  }
}

}  // namespace

void elementwise(const RunningTier& tier) {
  check_glu(tier);
  check_combine(tier);
  check_load_and_store(tier);
  check_stream_read(tier);
}

}  // namespace matrix
