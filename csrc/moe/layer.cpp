#include "layer.h"

#include <algorithm>
#include <memory>
#include <new>
#include <vector>

#include "../simd/float_bits.h"
#include "../simd/tier.h"
#include "../system/pool.h"
#include "../system/work.h"
#include "routes.h"

namespace cpu_moe {
namespace {

// Scratch of one round of tokens. Large enough that an expert's weights are read once for many tokens, small beside any
// bank.
constexpr int64_t kScratchBytes = int64_t{96} << 20;
// What a thread keeps between calls, so that decode does not allocate its scratch anew.
constexpr int64_t kKeepBytes = int64_t{16} << 20;

// Weight bytes of a work item. Small: the last item of a phase is what the other threads wait for (16 KiB are ~1 us).
// Large: what an item costs beside its rows (lists, results, counters) is shared by more of them.
constexpr int64_t kTileBytes = 64 << 10;
// Every pass over a tile reads its tokens' activations anew, so with many tokens a tile is larger (of the L2 cache's
// 256 KiB and more it leaves them half).
constexpr int64_t kManyTokensTileBytes = 128 << 10;
constexpr int64_t kManyTokens = 16;
constexpr int64_t kMaxTileRows = 128;  // of either projection of gate_up, or of down
// Planes computed per pass over a tile, which bounds the result buffer on the stack.
constexpr int64_t kMaxPlanes = 16;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

class Scratch {
 public:
  uint8_t* reserve(int64_t bytes) {
    if (bytes > size_) {
      data_.reset();
      size_ = 0;
      data_.reset(static_cast<uint8_t*>(::operator new(static_cast<size_t>(bytes), std::align_val_t{64})));
      size_ = bytes;
    }
    return data_.get();
  }
  void trim() {
    if (size_ > kKeepBytes) {
      data_.reset();
      size_ = 0;
    }
  }

 private:
  struct Free {
    void operator()(uint8_t* p) const { ::operator delete(p, std::align_val_t{64}); }
  };
  std::unique_ptr<uint8_t, Free> data_;
  int64_t size_ = 0;
};

// The outputs of one projection, cut into `streams` equal ranges; a tile takes `step` consecutive outputs from each, so
// that a thread that goes from tile to tile reads on where it left off in every range (see FormatKernels::streams).
struct Tiling {
  int64_t outputs, streams, range, step, per_group;
  Tiling(int64_t outputs_, int64_t streams_, int64_t bytes_per_output, int64_t groups, int64_t routes, int threads)
      : outputs(outputs_), streams(streams_), range(ceil_div(outputs_, streams_)) {
    const int64_t bytes = routes >= groups * kManyTokens ? kManyTokensTileBytes : kTileBytes;
    step = std::clamp<int64_t>(bytes / std::max<int64_t>(streams * bytes_per_output, 1), 1, kMaxTileRows / streams);
    // At least four items a thread, or a late thread leaves the others waiting.
    const int64_t wanted = ceil_div(4 * threads, std::max<int64_t>(groups, 1));
    step = std::clamp<int64_t>(ceil_div(range, wanted), 1, step);
    per_group = ceil_div(range, step);
  }

  // For every step of a tile: f(outputs, n), one output of each range that reaches so far.
  template <class F>
  void for_each_step(int64_t tile, F f) const {
    for (int64_t at = tile * step; at < std::min(range, (tile + 1) * step); ++at) {
      int32_t of_stream[kMaxStreams];
      int32_t n = 0;
      for (int64_t s = 0; s < streams && s * range + at < outputs; ++s) {
        of_stream[n++] = static_cast<int32_t>(s * range + at);
      }
      if (n != 0) f(of_stream, n);
    }
  }
};

int64_t row_bytes(const Weight& w) {
  int64_t bytes = 0;
  for (const int64_t stride : {w.row_stride[0], w.row_stride[1]}) bytes += stride;
  return bytes;
}

// Everything a round of tokens needs; one instance is shared by the team.
class Round {
 public:
  Round(const Experts& call, const TierKernels& tier, int64_t first, int64_t count, Routes& routes, uint8_t* scratch,
        int threads)
      : call_(call),
        tier_(tier),
        gate_up_(tier.formats[call.gate_up.format]),
        down_(tier.formats[call.down.format]),
        first_(first),
        routes_(routes),
        route_count_(static_cast<int64_t>(routes.routes.size())),
        group_count_(static_cast<int64_t>(routes.groups.size())),
        input_plane_bytes_(gate_up_.plane_bytes(call.hidden)),
        middle_plane_bytes_(down_.plane_bytes(call.intermediate)),
        // An output's gate row and its up row are two places, unless they are neighbours.
        gate_up_tiles_(call.intermediate, call.interleaved ? gate_up_.streams : 1, 2 * row_bytes(call.gate_up),
                       group_count_, route_count_, threads),
        down_tiles_(call.hidden, down_.streams, row_bytes(call.down), group_count_, route_count_, threads),
        input_planes_(static_cast<size_t>(count)),
        middle_planes_(static_cast<size_t>(route_count_)) {
    input_ = scratch;
    middle_ = input_ + count * 2 * input_plane_bytes_;
    activated_ = reinterpret_cast<float*>(middle_ + route_count_ * 2 * middle_plane_bytes_);
    partial_ = activated_ + route_count_ * padded(call.intermediate);
    prepare_work_.reset(count, threads);
    gate_up_work_.reset(group_count_ * gate_up_tiles_.per_group, threads);
    middle_work_.reset(route_count_, threads);
    down_work_.reset(group_count_ * down_tiles_.per_group, threads);
    combine_work_.reset(count * combine_parts(), threads);
  }

  static int64_t padded(int64_t n) { return ceil_div(n, 16) * 16; }
  static int64_t bytes_per_token(const Experts& call, const TierKernels& tier) {
    return 2 * tier.formats[call.gate_up.format].plane_bytes(call.hidden) +
           call.top_k * (2 * tier.formats[call.down.format].plane_bytes(call.intermediate) +
                         4 * padded(call.intermediate) + 4 * padded(call.hidden));
  }

  // Run by every member of the team.
  void run(sys::Team& team) {
    const int rank = team.rank();
    int64_t item;
    std::vector<float> row;
    while (prepare_work_.next(rank, item)) prepare_input(item, row);
    team.barrier();
    std::vector<const uint8_t*> planes;
    std::vector<int32_t> owner;
    while (gate_up_work_.next(rank, item)) gate_up_tile(item, planes, owner);
    team.barrier();
    while (middle_work_.next(rank, item)) prepare_middle(item);
    team.barrier();
    while (down_work_.next(rank, item)) down_tile(item, planes, owner);
    team.barrier();
    std::vector<const float*> parts;
    std::vector<float> weights;
    while (combine_work_.next(rank, item)) combine(item, parts, weights, row);
  }

 private:
  // A token's output is combined in stretches, so that one token keeps several threads busy.
  int64_t combine_parts() const { return ceil_div(call_.hidden, 512); }

  void prepare_input(int64_t t, std::vector<float>& row) {
    bool used = false;
    for (int64_t s = 0; s < call_.top_k; ++s) used |= routes_.of_token[static_cast<size_t>(t * call_.top_k + s)] >= 0;
    if (!used) return;
    row.resize(static_cast<size_t>(call_.hidden));
    const uint8_t* from = call_.input.data + (first_ + t) * call_.input.stride[0];
    if (call_.input.stride[1] == size_of(call_.input.dtype)) {
      tier_.load(call_.input.dtype, from, call_.hidden, row.data());
    } else {
      for (int64_t h = 0; h < call_.hidden; ++h) row[static_cast<size_t>(h)] = read_float(call_.input, first_ + t, h);
    }
    if (call_.weight_on_input) {  // top_k is 1
      const float weight = routes_.routes[static_cast<size_t>(routes_.of_token[static_cast<size_t>(t)])].weight;
      for (float& x : row) x *= weight;
    }
    input_planes_[static_cast<size_t>(t)] =
        gate_up_.prepare(row.data(), call_.hidden, call_.precision, input_ + t * 2 * input_plane_bytes_);
  }

  void prepare_middle(int64_t route) {
    middle_planes_[static_cast<size_t>(route)] =
        down_.prepare(activated_ + route * padded(call_.intermediate), call_.intermediate, call_.precision,
                      middle_ + route * 2 * middle_plane_bytes_);
  }

  // The planes of a group's routes in order; owner[p] is the route (within the group) that plane p belongs to.
  template <class PlaneOf>
  void list_planes(const Group& group, PlaneOf plane_of, std::vector<const uint8_t*>& planes,
                   std::vector<int32_t>& owner) {
    planes.clear();
    owner.clear();
    for (int64_t i = 0; i < group.count; ++i) {
      const auto [first, bytes, count] = plane_of(group.first + i);
      for (int p = 0; p < count; ++p) {
        planes.push_back(first + p * bytes);
        owner.push_back(static_cast<int32_t>(i));
      }
    }
  }

  struct Planes {
    const uint8_t* first;
    int64_t bytes;
    int count;
  };

  // results[p * stride + r] for planes [begin, end): a route's second plane is added to its first.
  static void fold_second_planes(float* results, int64_t stride, int64_t rows, const int32_t* owner, int64_t n) {
    for (int64_t p = 1; p < n; ++p) {
      if (owner[p] != owner[p - 1]) continue;
      for (int64_t r = 0; r < rows; ++r) results[(p - 1) * stride + r] += results[p * stride + r];
    }
  }

  // As many planes from `begin` as fit a pass without parting a route's two.
  static int64_t pass_end(const std::vector<int32_t>& owner, int64_t begin) {
    int64_t end = std::min<int64_t>(begin + kMaxPlanes, static_cast<int64_t>(owner.size()));
    if (end < static_cast<int64_t>(owner.size()) &&
        owner[static_cast<size_t>(end)] == owner[static_cast<size_t>(end - 1)]) {
      --end;
    }
    return end;
  }

  // The rows of a gate_up tile in the order in which they are read, and where each output's two are among them.
  struct GateUpRows {
    int32_t rows[2 * kMaxTileRows];
    int32_t output[kMaxTileRows], gate_at[kMaxTileRows], up_at[kMaxTileRows];
    int64_t outputs = 0;
  };

  void list_gate_up_rows(int64_t tile, GateUpRows& list) const {
    const int32_t intermediate = static_cast<int32_t>(call_.intermediate);
    gate_up_tiles_.for_each_step(tile, [&](const int32_t* outputs, int32_t n) {
      const int32_t first = static_cast<int32_t>(2 * list.outputs);
      for (int32_t i = 0; i < n; ++i, ++list.outputs) {
        const int32_t output = outputs[i];
        const int32_t gate_at = call_.interleaved ? first + i : first + 2 * i;
        const int32_t up_at = call_.interleaved ? first + n + i : first + 2 * i + 1;
        list.rows[gate_at] = call_.interleaved ? 2 * output : output;
        list.rows[up_at] = call_.interleaved ? 2 * output + 1 : intermediate + output;
        list.output[list.outputs] = output;
        list.gate_at[list.outputs] = gate_at;
        list.up_at[list.outputs] = up_at;
      }
    });
  }

  void gate_up_tile(int64_t item, std::vector<const uint8_t*>& planes, std::vector<int32_t>& owner) {
    const Group& group = routes_.groups[static_cast<size_t>(item / gate_up_tiles_.per_group)];
    GateUpRows list;
    list_gate_up_rows(item % gate_up_tiles_.per_group, list);
    const int64_t n = list.outputs, stride = 2 * n;
    list_planes(
        group,
        [&](int64_t route) {
          const int64_t t = routes_.routes[static_cast<size_t>(route)].token;
          return Planes{input_ + t * 2 * input_plane_bytes_, input_plane_bytes_, input_planes_[static_cast<size_t>(t)]};
        },
        planes, owner);
    float results[kMaxPlanes * 2 * kMaxTileRows];
    float bias[2 * kMaxTileRows];
    read_bias(call_.gate_up_bias, group.expert, list.rows, stride, bias);
    for (int64_t begin = 0; begin < static_cast<int64_t>(planes.size());) {
      const int64_t end = pass_end(owner, begin);
      gate_up_.dot(call_.gate_up, group.expert, list.rows, stride, &planes[static_cast<size_t>(begin)], end - begin,
                   results, stride);
      fold_second_planes(results, stride, stride, &owner[static_cast<size_t>(begin)], end - begin);
      for (int64_t p = begin; p < end; ++p) {
        if (p > begin && owner[static_cast<size_t>(p)] == owner[static_cast<size_t>(p - 1)]) continue;
        float gate[kMaxTileRows], up[kMaxTileRows], activated[kMaxTileRows];
        const float* at = results + (p - begin) * stride;
        for (int64_t i = 0; i < n; ++i) {
          gate[i] = at[list.gate_at[i]] + bias[list.gate_at[i]];
          up[i] = at[list.up_at[i]] + bias[list.up_at[i]];
        }
        tier_.glu(call_.activation, call_.alpha, call_.limit, gate, up, n, activated);
        const int64_t route = group.first + owner[static_cast<size_t>(p)];
        float* to = activated_ + route * padded(call_.intermediate);
        for (int64_t i = 0; i < n; ++i) to[list.output[i]] = activated[i];
      }
      begin = end;
    }
  }

  void down_tile(int64_t item, std::vector<const uint8_t*>& planes, std::vector<int32_t>& owner) {
    const Group& group = routes_.groups[static_cast<size_t>(item / down_tiles_.per_group)];
    int32_t rows[kMaxTileRows];
    int64_t n = 0;
    down_tiles_.for_each_step(item % down_tiles_.per_group, [&](const int32_t* outputs, int32_t count) {
      for (int32_t i = 0; i < count; ++i) rows[n++] = outputs[i];
    });
    list_planes(
        group,
        [&](int64_t route) {
          return Planes{middle_ + route * 2 * middle_plane_bytes_, middle_plane_bytes_,
                        middle_planes_[static_cast<size_t>(route)]};
        },
        planes, owner);
    float results[kMaxPlanes * kMaxTileRows];
    float bias[kMaxTileRows];
    read_bias(call_.down_bias, group.expert, rows, n, bias);
    for (int64_t begin = 0; begin < static_cast<int64_t>(planes.size());) {
      const int64_t end = pass_end(owner, begin);
      down_.dot(call_.down, group.expert, rows, n, &planes[static_cast<size_t>(begin)], end - begin, results, n);
      fold_second_planes(results, n, n, &owner[static_cast<size_t>(begin)], end - begin);
      for (int64_t p = begin; p < end; ++p) {
        if (p > begin && owner[static_cast<size_t>(p)] == owner[static_cast<size_t>(p - 1)]) continue;
        float* to = partial_ + (group.first + owner[static_cast<size_t>(p)]) * padded(call_.hidden);
        for (int64_t i = 0; i < n; ++i) to[rows[i]] = results[(p - begin) * n + i] + bias[i];
      }
      begin = end;
    }
  }

  static void read_bias(const View2D& from, int64_t expert, const int32_t* rows, int64_t n, float* bias) {
    for (int64_t i = 0; i < n; ++i) bias[i] = from.data ? read_float(from, expert, rows[i]) : 0.0f;
  }

  // Sums a token's routes in the order of their slots and writes its dtype.
  void combine(int64_t item, std::vector<const float*>& parts, std::vector<float>& weights, std::vector<float>& row) {
    const int64_t t = item / combine_parts();
    const int64_t h0 = item % combine_parts() * 512;
    const int64_t n = std::min<int64_t>(512, call_.hidden - h0);
    parts.clear();
    weights.clear();
    for (int64_t s = 0; s < call_.top_k; ++s) {
      const int32_t route = routes_.of_token[static_cast<size_t>(t * call_.top_k + s)];
      if (route < 0) continue;
      parts.push_back(partial_ + route * padded(call_.hidden) + h0);
      weights.push_back(call_.weight_on_input ? 1.0f : routes_.routes[static_cast<size_t>(route)].weight);
    }
    row.resize(512);
    tier_.combine(parts.data(), weights.data(), static_cast<int64_t>(parts.size()), n, row.data());
    tier_.store(call_.input.dtype, row.data(), n,
                call_.output + (first_ + t) * call_.output_stride + h0 * size_of(call_.input.dtype));
  }

  const Experts& call_;
  const TierKernels& tier_;
  const FormatKernels& gate_up_;
  const FormatKernels& down_;
  const int64_t first_;
  const Routes& routes_;
  const int64_t route_count_, group_count_;
  const int64_t input_plane_bytes_, middle_plane_bytes_;
  const Tiling gate_up_tiles_, down_tiles_;
  uint8_t* input_;    // [tokens][2 planes]
  uint8_t* middle_;   // [routes][2 planes]
  float* activated_;  // [routes][padded I]
  float* partial_;    // [routes][padded H]
  std::vector<int> input_planes_, middle_planes_;
  sys::WorkRanges prepare_work_, gate_up_work_, middle_work_, down_work_, combine_work_;
};

}  // namespace

void run_experts(const Experts& call) {
  if (call.tokens == 0 || call.hidden == 0) return;
  const TierKernels& tier = active_kernels();
  const int threads = sys::thread_count();
  const int64_t per_token = Round::bytes_per_token(call, tier);
  const int64_t per_round =
      std::max<int64_t>(1, std::min(call.tokens, kScratchBytes / std::max<int64_t>(per_token, 1)));
  thread_local Scratch scratch;
  thread_local Routes routes;
  uint8_t* memory = scratch.reserve(per_round * per_token);
  for (int64_t first = 0; first < call.tokens; first += per_round) {
    const int64_t count = std::min(per_round, call.tokens - first);
    collect_routes(call, first, count, routes);
    Round round(call, tier, first, count, routes, memory, threads);
    sys::run(threads, [&round](sys::Team& team) { round.run(team); });
  }
  scratch.trim();
}

}  // namespace cpu_moe
