#include "tier.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <atomic>
#include <cstdlib>
#include <mutex>
#include <stdexcept>

namespace cpu_moe {

namespace scalar {
TierKernels kernels();
}
#if defined(__x86_64__)
namespace avx2 {
TierKernels kernels();
}
namespace avx_vnni {
TierKernels kernels();
}
namespace avx512 {
TierKernels kernels();
}
namespace avx512_vnni {
TierKernels kernels();
}
namespace avx512_vbmi {
TierKernels kernels();
}
#elif defined(__aarch64__) && defined(__ARM_NEON)
namespace neon {
TierKernels kernels();
}
#endif

namespace {

bool always() { return true; }

#if defined(__x86_64__)
// __builtin_cpu_supports also asks the operating system (XCR0) for the wide registers. clang's does not know F16C.
bool has_avx2() {
  __builtin_cpu_init();
  unsigned eax, ebx, ecx, edx;
  constexpr unsigned kF16c = 1u << 29;
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & kF16c) != 0;
}
// Nor do older compilers' know AVX-VNNI.
bool has_avx_vnni() {
  unsigned eax, ebx, ecx, edx;
  constexpr unsigned kAvxVnni = 1u << 4;
  return has_avx2() && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0 && (eax & kAvxVnni) != 0;
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
bool has_avx512_vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }
bool has_avx512_vbmi() { return has_avx512_vnni() && __builtin_cpu_supports("avx512vbmi"); }
#endif

// Where the tiers' instructions are emulated (target.h), every CPU has them.
std::vector<Tier> as_built(std::vector<Tier> tiers) {
#if defined(CPU_MOE_EMULATED)
  for (Tier& tier : tiers) tier.supported = always;
#endif
  return tiers;
}

struct Active {
  const Tier* tier;
  TierKernels kernels;
};

std::mutex g_mutex;
std::atomic<const Active*> g_active{nullptr};
std::string g_requested;  // under g_mutex

const Tier& resolve(std::string_view name, std::string_view asked_by) {
  std::string valid;
  for (const Tier& tier : compiled_tiers()) {
    if (!tier.supported()) continue;
    if (tier.name == name) return tier;
    valid += valid.empty() ? "" : ", ";
    valid += tier.name;
  }
  bool compiled = false;
  for (const Tier& tier : compiled_tiers()) compiled |= tier.name == name;
  throw std::invalid_argument(std::string(asked_by) + ": '" + std::string(name) + "' is " +
                              (compiled ? "not supported by this CPU" : "no tier of this build") +
                              "; expected one of auto, " + valid);
}

const Active* activate(const Tier& tier) {
  // One entry a tier, made once and kept: readers hold no lock.
  static std::vector<const Active*> made(compiled_tiers().size(), nullptr);
  const size_t index = static_cast<size_t>(&tier - compiled_tiers().data());
  if (made[index] == nullptr) made[index] = new Active{&tier, tier.kernels()};
  g_active.store(made[index], std::memory_order_release);
  return made[index];
}

const Active* choose_default() {
  const char* asked = std::getenv("CPU_MOE_ISA");
  if (asked != nullptr && *asked != '\0' && std::string_view(asked) != "auto") {
    const Active* active = activate(resolve(asked, "CPU_MOE_ISA"));
    g_requested = asked;
    return active;
  }
  g_requested.clear();
  for (const Tier& tier : compiled_tiers()) {
    if (tier.supported()) return activate(tier);
  }
  return nullptr;  // not reached: scalar is always supported
}

const Active& active() {
  if (const Active* a = g_active.load(std::memory_order_acquire)) return *a;
  const std::lock_guard lock(g_mutex);
  if (const Active* a = g_active.load(std::memory_order_acquire)) return *a;
  return *choose_default();
}

}  // namespace

const std::vector<Tier>& compiled_tiers() {
  static const std::vector<Tier> tiers = as_built({
#if defined(__x86_64__)
      {"avx512-vbmi", has_avx512_vbmi, avx512_vbmi::kernels},
      {"avx512-vnni", has_avx512_vnni, avx512_vnni::kernels},
      {"avx512", has_avx512, avx512::kernels},
      {"avx-vnni", has_avx_vnni, avx_vnni::kernels},
      {"avx2", has_avx2, avx2::kernels},
#elif defined(__aarch64__) && defined(__ARM_NEON)
      {"neon", always, neon::kernels},
#endif
      {"scalar", always, scalar::kernels},
  });
  return tiers;
}

const Tier& active_tier() { return *active().tier; }
const TierKernels& active_kernels() { return active().kernels; }

void set_tier(std::string_view name) {
  const std::lock_guard lock(g_mutex);
  if (name == "auto") {
    choose_default();
    return;
  }
  activate(resolve(name, "set_tier"));
  g_requested = name;
}

bool prefetch_dense_rows() {
#if defined(__x86_64__)
  // What the makers' own prefetchers leave to be done differs: one token of bf16 reads a fifth faster with it on Intel
  // (Emerald Rapids), up to a fifth slower on AMD (Zen 3; docs/performance.md).
  static const bool intel = [] {
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid(0, &eax, &ebx, &ecx, &edx) != 0 && ebx == signature_INTEL_ebx && edx == signature_INTEL_edx &&
           ecx == signature_INTEL_ecx;
  }();
  return intel;
#else
  return false;
#endif
}

std::string requested_tier() {
  const std::lock_guard lock(g_mutex);
  return g_requested;
}

}  // namespace cpu_moe
