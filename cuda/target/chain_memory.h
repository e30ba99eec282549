// What the warpgroups of the gated delta rule's chain share, and the one that brings them the chunks. These lie in a
// ring of stages: one is `ready` when its copies have landed, and `free` when both others have worked on it.
#pragma once

#include "cuda/target/panels.h"

namespace flashport::FLASHPORT_TARGET {

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
  Handover entering_given, learned_given;
  unsigned flag;

  // By one thread, and by all; behind both the block meets.
  FLASHPORT_DEVICE void init_barriers() {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(&ready[i], kWarpgroup);
      mbarrier_init(&free[i], 2 * kWarpgroup);
    }
    entering_given.init();
    learned_given.init();
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

// The copying warpgroup's share of the chain, in the same order.
template <GatedDeltaChunkConfig kCfg>
class ChunkCopies {
  using Memory = ChainMemory<kCfg>;

 public:
  FLASHPORT_DEVICE ChunkCopies(const GatedDeltaChunkParams& p, const Block& block, Memory& memory)
      : p_(p),
        memory_(memory),
        thread_(block.thread()),
        wide_{has_wide_rows(p.q), has_wide_rows(p.k), has_wide_rows(p.v)} {}

  // Who waits for room for the next chunks does not wait for those on their way: they say themselves when they land.
  FLASHPORT_DEVICE void run(const Chain& chain) {
    for (int chunk = 0; chunk < chain.chunks; ++chunk) {
      bring(place_of(p_, chain, chunk), chain.column);
      mbarrier_arrive_behind_copies(&memory_.ready[filled_.tile]);
      filled_.next();
    }
  }

 private:
  FLASHPORT_DEVICE void bring(const ChunkPlace& place, int column) {
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

  const GatedDeltaChunkParams& p_;
  Memory& memory_;
  const int thread_;
  const struct {
    bool q, k, v;
  } wide_;
  RingPlace<Memory::kStages> filled_;
};
static_assert(sizeof(ChunkFactors) % 16 == 0 && sizeof(ChunkFactors) / 16 <= kWarpgroup);

}  // namespace flashport::FLASHPORT_TARGET
