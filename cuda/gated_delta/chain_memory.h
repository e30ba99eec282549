// Shared memory of the gated delta rule's chain, and the warpgroup that loads chunks into it and stores the outputs.
//
// A block has three warpgroups: one carries the state, one computes the outputs, and the producer copies. Chunks are
// loaded into a ring of stages. The mbarrier `full` of a stage completes when the producer's copies to it are complete,
// and `empty` when both of the others have read it. Where one warpgroup passes a tile to another once a chunk (the
// state, the new values, the outputs), the tile has one stage with the same two barriers.
#pragma once

#include "cuda/gated_delta/panels.h"

namespace flashport::FLASHPORT_TARGET::gated_delta {

inline constexpr int kWarpgroup = 128;
inline constexpr int kChainThreads = 3 * kWarpgroup;
inline constexpr int kChainBarrier = 1;  // the first warpgroup's own barrier; those of the others follow

// The barriers of a single stage between two warpgroups. The sender acquires, writes and commits; the receiver waits,
// reads and releases. Both count the stage's phase from 0.
struct StageBarriers {
  std::uint64_t full, empty;

  FLASHPORT_DEVICE void init() {
    mbarrier_init(&full, kWarpgroup);
    mbarrier_init(&empty, kWarpgroup);
  }
  FLASHPORT_DEVICE void acquire(unsigned phase) { mbarrier_wait(&empty, phase ^ 1); }
  FLASHPORT_DEVICE void commit() { mbarrier_arrive(&full); }
  FLASHPORT_DEVICE void wait(unsigned phase) { mbarrier_wait(&full, phase); }
  FLASHPORT_DEVICE void release() { mbarrier_arrive(&empty); }
};

template <GatedDeltaChunkConfig kCfg>
struct ChainStage {
  static constexpr int kPanels = kCfg.head_dim_k / kPanelColumns;
  Panels<kPanels> q, k;
  Panels<1> inverse, scores, v;
};

template <GatedDeltaChunkConfig kCfg>
struct ChainMemory {
  static constexpr int kStages = kCfg.head_dim_k > 128 ? 2 : 3;  // chunks that are loaded or in flight
  ChainStage<kCfg> stages[kStages];
  Panels<ChainStage<kCfg>::kPanels> state;  // transposed and rounded, from the warpgroup that carries it
  Panels<1> new_values, out;
  alignas(16) ChunkFactors factors[kStages];
  std::uint64_t full[kStages], empty[kStages];
  StageBarriers state_barriers, new_values_barriers, out_barriers;
  unsigned flag;

  // One thread calls init_barriers(), and all call clear_triangles(); a barrier of the block follows.
  FLASHPORT_DEVICE void init_barriers() {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(&full[i], kWarpgroup);
      mbarrier_init(&empty[i], 2 * kWarpgroup);
    }
    state_barriers.init();
    new_values_barriers.init();
    out_barriers.init();
  }

  // wgmma also reads the sub-blocks above the diagonal, which the producer does not load.
  FLASHPORT_DEVICE void clear_triangles(int thread) {
    for (ChainStage<kCfg>& stage : stages) {
      for (int i = thread; i < kPanelBytes / 16; i += kChainThreads) {
        const int row = i / 8, vector = i % 8, at = swizzled_offset(row, vector);
        if (vector / 2 <= row / 16) continue;
        *reinterpret_cast<uint4*>(stage.inverse.x[0] + at) = make_uint4(0, 0, 0, 0);
        *reinterpret_cast<uint4*>(stage.scores.x[0] + at) = make_uint4(0, 0, 0, 0);
      }
    }
    fence_async_proxy();
  }
};

// Waits until the prepare kernel has stored its results for a chunk; `index` is ChunkCoord's.
FLASHPORT_DEVICE void await_chunk_signal(const ChunkWorkspace& workspace, std::int64_t index) {
  if (workspace.signals != nullptr) await_signal(workspace.signals + index);
}

// The producer warpgroup walks the same chains in the same order. It loads the chunks, and stores the outputs of a
// chunk after it has begun to load the chunk that takes over its stage.
template <GatedDeltaChunkConfig kCfg>
class ChunkProducer {
  using Memory = ChainMemory<kCfg>;

 public:
  FLASHPORT_DEVICE ChunkProducer(const GatedDeltaChunkParams& p, const Block& block, Memory& memory)
      : p_(p),
        memory_(memory),
        thread_(block.thread()),
        wide_{has_wide_rows(p.q), has_wide_rows(p.k), has_wide_rows(p.v), has_wide_rows(p.out)} {}

  // The producer waits for empty stages only: copies in flight arrive at `full` by themselves when they are complete.
  FLASHPORT_DEVICE void run(const Chain& chain) {
    constexpr int kStages = Memory::kStages;
    for (int chunk = 0; chunk < chain.chunks; ++chunk) {
      load(chunk_coord(p_, chain, chunk), chain.column);
      mbarrier_arrive_on_copies(&memory_.full[pipe_.stage]);
      pipe_.next();
      if (chunk >= kStages) store_outputs(chain, chunk - kStages);
    }
    for (int chunk = maximum(chain.chunks - kStages, 0); chunk < chain.chunks; ++chunk) store_outputs(chain, chunk);
  }

 private:
  FLASHPORT_DEVICE void load(const ChunkCoord& coord, int column) {
    await_chunk_signal(p_.workspace, coord.index);
    mbarrier_wait(&memory_.empty[pipe_.stage], pipe_.phase ^ 1);
    const int count = coord.tokens.count;
    ChainStage<kCfg>& stage = memory_.stages[pipe_.stage];
    copy_rows<kWarpgroup>(stage.k, p_.k, coord.k, count, p_.head_dim_k, wide_.k, thread_);
    copy_rows<kWarpgroup>(stage.q, p_.q, coord.q, count, p_.head_dim_k, wide_.q, thread_);
    const int columns = minimum(p_.head_dim_v - column, kCfg.columns);
    copy_rows<kWarpgroup>(stage.v, p_.v, coord.v + column, count, columns, wide_.v, thread_);
    load_triangles(stage, coord.index);
    const auto* factors = reinterpret_cast<const char*>(p_.workspace.factors + coord.index);
    auto* to = reinterpret_cast<char*>(memory_.factors + pipe_.stage);
    constexpr int kVectors = sizeof(ChunkFactors) / 16;
    if (thread_ < kVectors) copy_async<16>(to + thread_ * 16, factors + thread_ * 16, true);
  }

  // Both matrices, except their sub-blocks of 16 x 16 above the diagonal.
  FLASHPORT_DEVICE void load_triangles(ChainStage<kCfg>& stage, std::int64_t index) const {
    constexpr int kRowsAtOnce = kWarpgroup / 8;
    const int vector = thread_ % 8, first = thread_ / 8;
    const std::int64_t from = (index * kChunkTokens + first) * kChunkTokens + vector * 8;
    const auto* inverse = static_cast<const std::uint16_t*>(p_.workspace.inverses) + from;
    const auto* scores = static_cast<const std::uint16_t*>(p_.workspace.scores) + from;
#pragma unroll
    for (int i = 0; i < kChunkTokens / kRowsAtOnce; ++i) {
      if (vector / 2 > i) continue;
      const int to = swizzled_offset(first + i * kRowsAtOnce, vector);
      copy_async<16>(stage.inverse.x[0] + to, inverse + i * kRowsAtOnce * kChunkTokens, true);
      copy_async<16>(stage.scores.x[0] + to, scores + i * kRowsAtOnce * kChunkTokens, true);
    }
  }
  static_assert(kWarpgroup / 8 == 16);

  FLASHPORT_DEVICE void store_outputs(const Chain& chain, int chunk) {
    constexpr int kRowsAtOnce = kWarpgroup / 8, kRows = kChunkTokens / kRowsAtOnce;
    const int thread = recompute(thread_);
    const int vector = thread % 8, first = thread / 8, column = chain.column + vector * 8;
    memory_.out_barriers.wait(out_phase_);
    out_phase_ ^= 1;
    uint4 eights[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      eights[i] = *reinterpret_cast<const uint4*>(memory_.out.x[0] + swizzled_offset(first + i * kRowsAtOnce, vector));
    }
    memory_.out_barriers.release();
    if (column >= p_.head_dim_v) return;
    const SequenceTokens tokens = chunk_coord(p_, chain, chunk).tokens;
    auto* to = static_cast<std::uint16_t*>(p_.out.data) + token_offset(p_.out, tokens, first, chain.v_head) + column;
    const std::int64_t step = kRowsAtOnce * p_.out.stride_token;
#pragma unroll
    for (int i = 0; i < kRows; ++i, to += step) {
      if (first + i * kRowsAtOnce >= tokens.count) break;
      if (wide_.out) {
        __stcs(reinterpret_cast<uint4*>(to), eights[i]);  // other cache hints cost 5%
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
  PipelineState<Memory::kStages> pipe_;
  unsigned out_phase_ = 0;
};
static_assert(sizeof(ChunkFactors) % 16 == 0 && sizeof(ChunkFactors) / 16 <= kWarpgroup);

}  // namespace flashport::FLASHPORT_TARGET::gated_delta
