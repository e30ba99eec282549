// What the warpgroups of the gated delta rule's chain share, and the one that brings them the chunks and takes the
// outputs away. Chunks lie in a ring of stages: one is `ready` when its copies have landed, and `free` when both others
// have worked on it.
#pragma once

#include "cuda/gated_delta/panels.h"

namespace flashport::FLASHPORT_TARGET::gated_delta {

inline constexpr int kWarpgroup = 128;
inline constexpr int kChainThreads = 3 * kWarpgroup;
inline constexpr int kChainBarrier = 1;  // the first warpgroup's own; those of the others follow

// An operand in shared memory that one warpgroup hands to another, once a chunk.
struct Handover {
  std::uint64_t full, empty;

  FLASHPORT_DEVICE void init() {
    mbarrier_init(&full, kWarpgroup);
    mbarrier_init(&empty, kWarpgroup);
  }
};

template <GatedDeltaChunkConfig kCfg>
struct ChainStage {
  static constexpr int kPanels = kCfg.head_dim_k / kPanelColumns;
  Panels<kPanels> q, k;
  Panels<1> transform, scores, v;
};

template <GatedDeltaChunkConfig kCfg>
struct ChainMemory {
  static constexpr int kStages = kCfg.head_dim_k > 128 ? 2 : 3;  // chunks that are there or on their way
  ChainStage<kCfg> stages[kStages];
  Panels<ChainStage<kCfg>::kPanels> entering;  // the state, transposed, from who carries it to who makes outputs
  Panels<1> learned, out;
  alignas(16) ChunkFactors factors[kStages];
  std::uint64_t ready[kStages], free[kStages];
  Handover entering_given, learned_given, out_given;
  unsigned flag;

  // By one thread, and by all; behind both the block meets.
  FLASHPORT_DEVICE void init_barriers() {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(&ready[i], kWarpgroup);
      mbarrier_init(&free[i], 2 * kWarpgroup);
    }
    entering_given.init();
    learned_given.init();
    out_given.init();
  }

  // wgmma reads blocks above the diagonal too, which nobody brings.
  FLASHPORT_DEVICE void clear_triangles(int thread) {
    for (ChainStage<kCfg>& stage : stages) {
      for (int i = thread; i < kPanelBytes / 16; i += kChainThreads) {
        const int row = i / 8, unit = i % 8, at = panel_place(row, unit);
        if (unit / 2 <= row / 16) continue;
        *reinterpret_cast<uint4*>(stage.transform.x[0] + at) = make_uint4(0, 0, 0, 0);
        *reinterpret_cast<uint4*>(stage.scores.x[0] + at) = make_uint4(0, 0, 0, 0);
      }
    }
    fence_async_proxy();
  }
};

// Waits until what the prepare kernel makes of a chunk is there.
FLASHPORT_DEVICE void await_prepared(const ChunkWorkspace& workspace, std::int64_t place) {
  if (workspace.prepared != nullptr) await_announced(workspace.prepared + place);
}

// The copying warpgroup's share of the chain, in the same order: it brings the chunks, and takes a chunk's outputs away
// when the one that follows it in the ring's stage is on its way.
template <GatedDeltaChunkConfig kCfg>
class ChunkCopies {
  using Memory = ChainMemory<kCfg>;

 public:
  FLASHPORT_DEVICE ChunkCopies(const GatedDeltaChunkParams& p, const Block& block, Memory& memory)
      : p_(p),
        memory_(memory),
        thread_(block.thread()),
        wide_{has_wide_rows(p.q), has_wide_rows(p.k), has_wide_rows(p.v), has_wide_rows(p.out)} {}

  // Who waits for room for the next chunks does not wait for those on their way: they say themselves when they land.
  FLASHPORT_DEVICE void run(const Chain& chain) {
    constexpr int kStages = Memory::kStages;
    for (int chunk = 0; chunk < chain.chunks; ++chunk) {
      bring(place_of(p_, chain, chunk), chain.column);
      mbarrier_arrive_behind_copies(&memory_.ready[filled_.tile]);
      filled_.next();
      if (chunk >= kStages) take_outputs(chain, chunk - kStages);
    }
    for (int chunk = maximum(chain.chunks - kStages, 0); chunk < chain.chunks; ++chunk) take_outputs(chain, chunk);
  }

 private:
  FLASHPORT_DEVICE void bring(const ChunkPlace& place, int column) {
    await_prepared(p_.workspace, place.workspace);
    mbarrier_wait(&memory_.free[filled_.tile], filled_.phase ^ 1);
    const int count = place.tokens.count;
    ChainStage<kCfg>& stage = memory_.stages[filled_.tile];
    copy_rows<kWarpgroup>(stage.k, p_.k, place.k, count, p_.head_dim_k, wide_.k, thread_);
    copy_rows<kWarpgroup>(stage.q, p_.q, place.q, count, p_.head_dim_k, wide_.q, thread_);
    const int columns = minimum(p_.head_dim_v - column, kCfg.columns);
    copy_rows<kWarpgroup>(stage.v, p_.v, place.v + column, count, columns, wide_.v, thread_);
    bring_triangles(stage, place.workspace);
    const auto* factors = reinterpret_cast<const char*>(p_.workspace.factors + place.workspace);
    auto* to = reinterpret_cast<char*>(memory_.factors + filled_.tile);
    constexpr int kUnits = sizeof(ChunkFactors) / 16;
    if (thread_ < kUnits) copy_async<16>(to + thread_ * 16, factors + thread_ * 16, true);
  }

  // Both matrices, but for what lies above the diagonal's blocks of 16.
  FLASHPORT_DEVICE void bring_triangles(ChainStage<kCfg>& stage, std::int64_t place) const {
    constexpr int kRowsAtOnce = kWarpgroup / 8;
    const int unit = thread_ % 8, first = thread_ / 8;
    const std::int64_t from = (place * kChunkTokens + first) * kChunkTokens + unit * 8;
    const auto* transform = static_cast<const std::uint16_t*>(p_.workspace.transforms) + from;
    const auto* scores = static_cast<const std::uint16_t*>(p_.workspace.scores) + from;
#pragma unroll
    for (int i = 0; i < kChunkTokens / kRowsAtOnce; ++i) {
      if (unit / 2 > i) continue;
      const int to = panel_place(first + i * kRowsAtOnce, unit);
      copy_async<16>(stage.transform.x[0] + to, transform + i * kRowsAtOnce * kChunkTokens, true);
      copy_async<16>(stage.scores.x[0] + to, scores + i * kRowsAtOnce * kChunkTokens, true);
    }
  }
  static_assert(kWarpgroup / 8 == 16);

  FLASHPORT_DEVICE void take_outputs(const Chain& chain, int chunk) {
    constexpr int kRowsAtOnce = kWarpgroup / 8, kRows = kChunkTokens / kRowsAtOnce;
    const int thread = recompute(thread_);
    const int unit = thread % 8, first = thread / 8, column = chain.column + unit * 8;
    mbarrier_wait(&memory_.out_given.full, taken_);
    taken_ ^= 1;
    uint4 eights[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      eights[i] = *reinterpret_cast<const uint4*>(memory_.out.x[0] + panel_place(first + i * kRowsAtOnce, unit));
    }
    mbarrier_arrive(&memory_.out_given.empty);
    if (column >= p_.head_dim_v) return;
    const SequenceTokens tokens = place_of(p_, chain, chunk).tokens;
    auto* to = static_cast<std::uint16_t*>(p_.out.data) + token_offset(p_.out, tokens, first, chain.v_head) + column;
    const std::int64_t step = kRowsAtOnce * p_.out.stride_token;
#pragma unroll
    for (int i = 0; i < kRows; ++i, to += step) {
      if (first + i * kRowsAtOnce >= tokens.count) break;
      if (wide_.out) {
        __stcs(reinterpret_cast<uint4*>(to), eights[i]);  // others cost 5%
      } else {
        std::uint16_t values[8];
        memcpy(values, &eights[i], sizeof values);
        for (int j = 0; j < 8; ++j) to[j] = values[j];
      }
    }
  }

  const GatedDeltaChunkParams& p_;
  Memory& memory_;
  const int thread_;
  const struct {
    bool q, k, v, out;
  } wide_;
  RingPlace<Memory::kStages> filled_;
  unsigned taken_ = 0;  // phase of the next outputs
};
static_assert(sizeof(ChunkFactors) % 16 == 0 && sizeof(ChunkFactors) / 16 <= kWarpgroup);

}  // namespace flashport::FLASHPORT_TARGET::gated_delta
