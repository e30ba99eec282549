// Shared memory of the attention kernel, and the barriers between its producer and its consumers.
//
// Queries, keys and values lie in panels of 64 columns (wgmma.h). A stage of keys or values is filled by the producer,
// and `full` completes when it has landed; `empty` completes when all consumer warps have read it. Work tiles go the
// same way: the producer takes them and tells the consumers.
#pragma once

#include <type_traits>

#include "common/device/attention/work.h"
#include "cuda/arch/tma.h"
#include "cuda/arch/wgmma.h"

namespace flashport::FLASHPORT_TARGET::attention {

inline constexpr int kWarpgroup = 128;
inline constexpr int kWorkStages = 3, kQueryStages = 1;

// Whether biases come to shared memory: in kernels of them alone, whose biases are aligned.
constexpr bool brings_bias(const AttentionConfig& config) { return config.shape.form == ScoreForm::kBias; }
// The producer warps that bring rows. The last of four brings biases.
constexpr int row_warps(const AttentionConfig& config) { return brings_bias(config) ? 2 : 3; }
constexpr int panels_of(int columns) { return (columns + kPanelColumns - 1) / kPanelColumns; }
constexpr int consumer_groups(const AttentionTuning& tuning) { return tuning.rows / 64 * tuning.slices; }
constexpr int consumer_threads(const AttentionConfig& config) { return consumer_groups(config.tuning) * kWarpgroup; }
constexpr int block_threads(const AttentionConfig& config) { return kWarpgroup + consumer_threads(config); }

constexpr int value_stages(const AttentionTuning& tuning) {
  return tuning.value_stages > 0 ? tuning.value_stages : tuning.stages;
}

template <int kCount, int kRows>
struct alignas(1024) RowPanels {
  static constexpr int kPanelSize = kRows * 128;
  static constexpr int kBytes = kCount * kPanelSize;
  unsigned char x[kCount][kPanelSize];
};

struct Barriers {
  std::uint64_t full, empty;
  FLASHPORT_DEVICE void init(int senders, int receivers) {
    mbarrier_init(&full, senders);
    mbarrier_init(&empty, receivers);
  }
};

// The biases of a kernel of them alone: of each warpgroup's queries, for the keys of a tile.
template <AttentionConfig kCfg>
struct BiasMemory {
  RowPanels<panels_of(kCfg.tuning.keys), 64> x[consumer_groups(kCfg.tuning)];
  Barriers barriers[consumer_groups(kCfg.tuning)];
};
struct NoBiasMemory {};

template <AttentionConfig kCfg>
struct AttentionMemory {
  static constexpr AttentionTuning kTuning = kCfg.tuning;
  using Queries = RowPanels<panels_of(kCfg.shape.head_dim_qk), kTuning.rows>;
  using Keys = RowPanels<panels_of(kCfg.shape.head_dim_qk), kTuning.keys>;
  using Values = RowPanels<panels_of(kCfg.shape.head_dim_v), kTuning.keys>;

  Queries queries[kQueryStages];
  Keys keys[kTuning.stages];
  Values values[value_stages(kTuning)];
  std::conditional_t<brings_bias(kCfg), BiasMemory<kCfg>, NoBiasMemory> bias;
  WorkTile work[kWorkStages];  // seq -1: there are no more
  Barriers work_barriers[kWorkStages], query_barriers[kQueryStages];
  Barriers key_barriers[kTuning.stages], value_barriers[value_stages(kTuning)];
  Barriers row_barriers;  // by which the lane that brings boxes hands a stage to the warp that brings rows of values
  std::int32_t pages[2][kTuning.keys];  // of two tiles of keys (producer.h)
  alignas(
      16) std::int64_t offsets[kTuning.rows > kTuning.keys ? kTuning.rows : kTuning.keys];  // of rows (row_copies.h)
  alignas(16) std::int64_t value_offsets[kTuning.keys];  // two warps may find rows of queries and of values at a time
  unsigned flag;
  unsigned unread;  // wgmma_wait_after()

  // One thread; a barrier of the block follows.
  FLASHPORT_DEVICE void init(const AttentionParams& p) {
    constexpr int kConsumers = consumer_threads(kCfg) / kWaveSize;
    const int senders = p.has_kv_maps != 0 ? 1 : row_warps(kCfg);
    for (auto& barriers : work_barriers) barriers.init(1, kConsumers + 3);
    query_barriers[0].init(p.has_q_map != 0 ? 1 : senders, kConsumers);
    for (auto& barriers : key_barriers) barriers.init(senders, kConsumers);
    for (auto& barriers : value_barriers) barriers.init(senders, kConsumers);
    if constexpr (brings_bias(kCfg)) {
      for (auto& barriers : bias.barriers) barriers.init(1, kWarpgroup / kWaveSize);
    }
    row_barriers.init(1, 1);
    fence_barrier_init();
  }
};

// The work tiles as a warp receives them.
template <AttentionConfig kCfg>
class WorkTiles {
 public:
  FLASHPORT_DEVICE explicit WorkTiles(AttentionMemory<kCfg>& memory) : memory_(memory) {}

  // The next one, in shared memory; seq -1: there are no more.
  FLASHPORT_DEVICE const WorkTile& receive() {
    mbarrier_wait(&memory_.work_barriers[pipe_.stage].full, pipe_.phase);
    return memory_.work[pipe_.stage];
  }
  // After its last use in shared memory.
  FLASHPORT_DEVICE void release() {
    mbarrier_arrive_wave(&memory_.work_barriers[pipe_.stage].empty);
    pipe_.next();
  }

 private:
  AttentionMemory<kCfg>& memory_;
  PipelineState<kWorkStages> pipe_;
};

}  // namespace flashport::FLASHPORT_TARGET::attention
