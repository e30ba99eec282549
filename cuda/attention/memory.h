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
#include "cuda/attention/row_factors.h"
#include "cuda/attention/stored_rows.h"
#include FLASHPORT_ATTENTION_TUNING_HEADER

namespace flashport::FLASHPORT_TARGET::attention {

inline constexpr int kWarpgroup = 128;
inline constexpr int kWorkStages = 3, kQueryStages = 1;

// Whether biases come to shared memory: in kernels of them alone.
constexpr bool brings_bias(const AttentionConfig& config) { return config.shape.form == ScoreForm::kBias; }
// Warps that bring them where TMA cannot: one that has nothing else to do, and one that has little if boxes bring keys
// and values.
FLASHPORT_DEVICE int bias_row_warps(const AttentionParams& p) { return p.has_kv_maps != 0 ? 2 : 1; }
constexpr int panels_of(int columns) { return (columns + kPanelColumns - 1) / kPanelColumns; }
constexpr int consumer_groups(const AttentionTuning& tuning) { return tuning.rows / 64 * tuning.slices; }
constexpr int consumer_threads(const AttentionConfig& config) { return consumer_groups(config.tuning) * kWarpgroup; }
constexpr int block_threads(const AttentionConfig& config) {
  return producer_groups(config) * kWarpgroup + consumer_threads(config);
}
constexpr int producer_warps(const AttentionConfig& config) { return producer_groups(config) * kWarpgroup / kWaveSize; }
// Those that bring rows of keys and values: one takes work tiles, and where there are biases one brings them.
constexpr int row_warps(const AttentionConfig& config) {
  return producer_warps(config) - (brings_bias(config) ? 2 : 1);
}

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

// Rows as they are stored, on their way to be widened (widening_producer.h).
template <AttentionConfig kCfg>
struct StoredSlots {};
template <AttentionConfig kCfg>
  requires(stored_bytes(kCfg) > 0)
struct StoredSlots<kCfg> {
  static constexpr int kBytes = stored_bytes(kCfg), kMost = cuda_attention::kMostStoredSlots;
  alignas(128) unsigned char bytes[kBytes + 16];  // what follows the last row may be read
  std::uint64_t landed[row_warps(kCfg)][kMost];
  std::uint8_t shifts[kMost + 1][kCfg.tuning.keys];     // by how many bytes a row begins inside of 16; the last unused
  std::uint8_t factor_begins[kMost][kCfg.tuning.keys];  // of rows with factors beside them, which come after the row

  // For what comes by boxes (stored_boxes.h): barriers of slots, and what a key that is not there is read from.
  Barriers boxes[cuda_attention::kWideningWarps][kMost];
  std::uint64_t queries_landed;  // to be converted where they lie
  alignas(16) unsigned char zeros[cuda_attention::kMostStoredRow];

  std::int32_t pitch, slots;  // bytes from row to row, and how many tiles there is room for
  std::int32_t factor_pitch;  // of what comes by boxes: bytes of a row's factors after the rows of a slot

  FLASHPORT_DEVICE void init(const AttentionParams& p) {
    pitch = maximum(pitch_of(p.cache.k, factor_room(p.k_row_scales, p.head_dim_qk)),
                    pitch_of(p.cache.v, factor_room(p.v_row_scales, p.head_dim_v)));
    slots = minimum(kBytes / (kCfg.tuning.keys * pitch), kMost);
    const cuda_attention::Factors k = cuda_attention::factors_of(p.k_row_scales);
    const cuda_attention::Factors v = cuda_attention::factors_of(p.v_row_scales);
    if (p.k_box.row_bytes != 0) {
      pitch = maximum(p.k_box.row_bytes, p.v_box.row_bytes);
      factor_pitch = maximum(cuda_attention::factor_pitch(k), cuda_attention::factor_pitch(v));
      slots = minimum(kBytes / (cuda_attention::kWideningWarps * slot_bytes()), kMost);
    }
    for (int warp = 0; warp < cuda_attention::kWideningWarps; ++warp) {
      // The boxes of a slot, and the factors that each lane brings.
      const bool alone = (warp < cuda_attention::kWarpsOfTile ? k : v) == cuda_attention::Factors::kNone;
      for (Barriers& barriers : boxes[warp]) barriers.init(alone ? 1 : 1 + kWaveSize, 1);
    }
    mbarrier_init(&queries_landed, 1);
    for (unsigned char& zero : zeros) zero = 0;
    for (auto& of_warp : landed) {
      for (std::uint64_t& barrier : of_warp) mbarrier_init(&barrier, kWaveSize);
    }
  }

  // From a slot to the next of a warp that widens what comes by boxes; `slots` of them are the warp's, and those of the
  // warps lie one after the other.
  FLASHPORT_DEVICE int slot_bytes() const { return (pitch + factor_pitch) * cuda_attention::kStoredRows; }

  // Bytes of a row's place before its factors.
  FLASHPORT_DEVICE static int row_room(const CacheParams& cache) {
    return (cache.row_bytes + 16 - cache.copy_unit + 15) / 16 * 16;
  }

 private:
  static_assert(kBytes >=
                2 * kCfg.tuning.keys *
                    (cuda_attention::kMostStoredRow + cuda_attention::factor_pitch(cuda_attention::Factors::kHalves)));
  // The longest row is of 16-bit numbers at any even address, with a factor of fp32 for every 8 of them.
  static_assert(kBytes >= kCfg.tuning.keys * (kCfg.shape.head_dim_qk * 5 / 2 + 32));
  // An odd multiple of 32, so that few units of neighbouring rows lie in the same banks.
  FLASHPORT_DEVICE static int pitch_of(const CacheParams& cache, int factors) {
    const int units = (row_room(cache) + factors) / 16;
    return 16 * (units + (2 - units & 3));
  }
};

// What two blocks tell each other that share the widened rows of a tile (shared_tiles.h).
constexpr bool may_share_tiles(const AttentionConfig& config) { return config.tuning.cluster > 1; }
template <AttentionConfig kCfg>
struct ClusterMemory {};
template <AttentionConfig kCfg>
  requires(may_share_tiles(kCfg))
struct ClusterMemory<kCfg> {
  std::uint64_t free_keys[kCfg.tuning.stages], free_values[value_stages(kCfg.tuning)];
  Barriers told;
  unsigned taken;  // work tiles
  FLASHPORT_DEVICE void init() {
    for (std::uint64_t& barrier : free_keys) mbarrier_init(&barrier, 1);
    for (std::uint64_t& barrier : free_values) mbarrier_init(&barrier, 1);
    told.init(1, 1);
  }
};
// Whether queries come as boxes of another type of 16 bits, beside boxes of keys.
template <AttentionConfig kCfg>
FLASHPORT_DEVICE bool converts_queries(const AttentionParams& p) {
  return stored_bytes(kCfg) > 0 && p.has_q_map != 0 && p.q.dtype == DType::kBFloat16 &&
         kCfg.shape.math == MathType::kFp16;
}
template <AttentionConfig kCfg>
FLASHPORT_DEVICE bool shares_tiles(const AttentionParams& p) {
  return may_share_tiles(kCfg) && p.k_box.row_bytes != 0 && p.group_size % 2 == 0;
}

// Factors beside the rows of a tile, of which each warp brings and uses those of its own rows.
template <AttentionConfig kCfg>
struct TileFactors {};
template <AttentionConfig kCfg>
  requires(has(kCfg.shape.sources, KeySources::kScaled) && stored_bytes(kCfg) == 0)
struct TileFactors<kCfg> {
  static constexpr int kPitch = kCfg.shape.head_dim_qk / 8 * 4 + 16;
  alignas(16) unsigned char bytes[kCfg.tuning.keys * kPitch];
  std::uint8_t begins[kCfg.tuning.keys];
};

// The biases of a kernel of them alone. A stage has those of one warpgroup's 64 queries for a part of a key tile: as
// many keys as 128 bytes have. A box lies as TMA swizzles it. Rows that come without TMA lie as in memory, each from a
// multiple of 16 bytes on, so that its first bias comes up to 14 bytes later.
inline constexpr int kBiasPartBytes = 128, kBiasPitch = kBiasPartBytes + 16;
template <AttentionConfig kCfg>
struct BiasMemory {
  static constexpr int kStages = bias_stages(kCfg.shape);
  struct alignas(1024) Stage {
    unsigned char rows[64 * kBiasPitch];
  };
  struct Ring {
    Stage stages[kStages];
  };
  Ring x[consumer_groups(kCfg.tuning)];
  Barriers barriers[consumer_groups(kCfg.tuning)][kStages];
};
struct NoBiasMemory {};

// A right operand of eight columns, all of ones: a product with it sums the rounded weights of each row.
struct Ones {
  alignas(1024) std::uint32_t two[8 * 128 / 4];
  FLASHPORT_DEVICE void init() {
    for (std::uint32_t& x : two) x = 0x3f803f80u;  // in bf16
    fence_async_proxy();
  }
};
struct NoOnes {};

template <AttentionConfig kCfg>
struct AttentionMemory {
  static constexpr AttentionTuning kTuning = kCfg.tuning;
  using Queries = RowPanels<panels_of(kCfg.shape.head_dim_qk), kTuning.rows>;
  using Keys = RowPanels<panels_of(kCfg.shape.head_dim_qk), kTuning.keys>;
  using Values = RowPanels<panels_of(kCfg.shape.head_dim_v), kTuning.keys>;

  Queries queries[kQueryStages];
  Keys keys[kTuning.stages];
  Values values[value_stages(kTuning)];
  using Biases = std::conditional_t<brings_bias(kCfg), BiasMemory<kCfg>, NoBiasMemory>;
  Biases bias;
  std::conditional_t<has_unshifted_weights(kCfg.shape), Ones, NoOnes> ones;
  WorkTile work[kWorkStages];  // seq -1: there are no more
  Barriers work_barriers[kWorkStages], query_barriers[kQueryStages];
  Barriers key_barriers[kTuning.stages], value_barriers[value_stages(kTuning)];
  Barriers row_barriers;  // by which the lane that brings boxes hands a stage to the warp that brings rows of values
  std::int32_t pages[2][kTuning.keys];  // of two tiles of keys (producer.h)
  alignas(
      16) std::int64_t offsets[kTuning.rows > kTuning.keys ? kTuning.rows : kTuning.keys];  // of rows (row_copies.h)
  alignas(16) std::int64_t value_offsets[kTuning.keys];  // two warps may find rows of queries and of values at a time
  [[no_unique_address]] StoredSlots<kCfg> stored;
  [[no_unique_address]] ClusterMemory<kCfg> cluster;
  [[no_unique_address]] TileFactors<kCfg> factors;
  unsigned flag;
  unsigned unread;  // wgmma_wait_after()

  // One thread; a barrier of the block follows.
  FLASHPORT_DEVICE void init(const AttentionParams& p) {
    constexpr int kConsumers = consumer_threads(kCfg) / kWaveSize;
    const bool by_stored_boxes = stored_bytes(kCfg) > 0 && p.k_box.row_bytes != 0;
    const int senders = p.has_kv_maps != 0 ? 1 : by_stored_boxes ? cuda_attention::kWarpsOfTile : row_warps(kCfg);
    const int query_senders = by_stored_boxes ? cuda_attention::kStoredQueryWarps : senders;
    for (auto& barriers : work_barriers) barriers.init(1, kConsumers + producer_warps(kCfg) - 1);
    query_barriers[0].init(p.has_q_map != 0 && !converts_queries<kCfg>(p) ? 1 : query_senders, kConsumers);
    for (auto& barriers : key_barriers) barriers.init(senders, kConsumers);
    for (auto& barriers : value_barriers) barriers.init(senders, kConsumers);
    if constexpr (brings_bias(kCfg)) {
      const int bias_senders = p.bias.has_map != 0 ? 1 : kWaveSize;
      for (auto& of_group : bias.barriers) {
        for (auto& barriers : of_group) barriers.init(bias_senders, kWarpgroup / kWaveSize);
      }
    }
    row_barriers.init(1, 1);
    if constexpr (has_unshifted_weights(kCfg.shape)) ones.init();
    if constexpr (stored_bytes(kCfg) > 0) stored.init(p);
    if constexpr (may_share_tiles(kCfg)) cluster.init();
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
