// The producer warp: takes work tiles, and brings their queries, keys and values to shared memory.
//
// TMA brings whole boxes. The last values of a sequence come by cp.async with zeros after them, where the tensor has
// other rows there: TMA would bring those, and 0 times NaN is NaN. Rows of keys and queries that are not the sequence's
// own do no harm: their scores are hidden, their outputs not stored. Tensors that TMA cannot read (rows that are not
// aligned to 16 bytes) come by copies of elements.
//
// The warp has few registers, because the consumers have many. So all copies are one piece of code, and what a copy
// needs is read again for each.
#pragma once

#include "common/device/attention/tile_scheduler.h"
#include "cuda/attention/memory.h"

namespace flashport::FLASHPORT_TARGET::attention {

template <AttentionConfig kCfg>
class Producer {
  using Memory = AttentionMemory<kCfg>;
  static constexpr int kKeys = kCfg.tuning.keys, kRows = kCfg.tuning.rows, kStages = kCfg.tuning.stages;

 public:
  FLASHPORT_DEVICE Producer(const AttentionParams& p, const Block& block, Memory& memory)
      : p_(p), lane_(block.lane()), memory_(memory), scheduler_(p, block) {}

  FLASHPORT_DEVICE void run() {
    const int count = scheduler_.count();
    int index = static_cast<int>(blockIdx.x);
    while (index < count) {
      send(scheduler_.tile(index));
      bring();
      index = next_index(count);
    }
    WorkTile none = {};
    none.seq = -1;
    send(none);
  }

 private:
  // All blocks together add `count` times: the last of them clears the counter for the next launch.
  FLASHPORT_DEVICE int next_index(int count) {
    unsigned taken = 0;
    if (lane_ == 0) {
      taken = atomicAdd(p_.counter, 1u);
      if (taken == static_cast<unsigned>(count) - 1) atomicExch(p_.counter, 0u);
    }
    return static_cast<int>(gridDim.x + __shfl_sync(~0u, taken, 0));
  }

  FLASHPORT_DEVICE void send(const WorkTile& work) {
    work_.next();
    Barriers& barriers = memory_.work_barriers[work_.stage];
    mbarrier_wait(&barriers.empty, work_.phase ^ 1);
    if (lane_ == 0) {
      memory_.work[work_.stage] = work;
      mbarrier_arrive(&barriers.full);
    }
    __syncwarp();
  }

  // What was sent last: the queries, then the keys of each tile before the values of the tile before it.
  FLASHPORT_DEVICE void bring() {
    const WorkTile& work = memory_.work[work_.stage];
    const KeyTiles range = key_tiles<kKeys>(p_, work, kRows);
    if (range.begin >= range.end) return;
    copy(kQueries, 0);
#pragma unroll 1
    for (int tile = range.begin; tile <= range.end; ++tile) {
#pragma unroll 1
      for (int part = kKeysOf; part <= kValuesOf; ++part) {
        const int its_tile = part == kKeysOf ? tile : tile - 1;
        if (its_tile >= range.begin && its_tile < range.end) copy(part, its_tile);
      }
    }
  }

  enum Part { kQueries, kKeysOf, kValuesOf };

  FLASHPORT_DEVICE void copy(int part, int tile) {
    const WorkTile& work = memory_.work[work_.stage];
    const bool of_queries = part == kQueries;
    const StridedRows& from = of_queries ? p_.q : part == kKeysOf ? p_.k : p_.v;
    const int columns = part == kValuesOf ? p_.head_dim_v : p_.head_dim_qk;
    const int head = of_queries ? work.head : work.head / p_.group_size;
    const std::int64_t first = of_queries ? work.q_begin + work.first_row : work.k_begin + tile * kKeys;
    const int tile_rows = of_queries ? kRows : kKeys;
    const int rows = minimum(of_queries ? work.q_len - work.first_row : work.kv_len - tile * kKeys, tile_rows);
    const int panels = part == kValuesOf ? panels_of(kCfg.shape.head_dim_v) : panels_of(kCfg.shape.head_dim_qk);
    // Copies of a kind so far give the stage and its phase.
    const int copies = of_queries ? queries_++ : part == kKeysOf ? keys_++ : values_++;
    const int stage = of_queries ? 0 : copies % kStages;
    const unsigned phase = static_cast<unsigned>(of_queries ? copies : copies / kStages) & 1;
    Barriers* barriers = &memory_.query_barriers;
    unsigned char* to = memory_.queries.x[0];
    if (!of_queries) {
      barriers = (part == kKeysOf ? memory_.key_barriers : memory_.value_barriers) + stage;
      to = part == kKeysOf ? memory_.keys[stage].x[0] : memory_.values[stage].x[0];
    }
    mbarrier_wait(&barriers->empty, phase ^ 1);

    const bool stops_early = part == kValuesOf && rows < tile_rows && has_rows_after(first + rows);
    if (p_.has_maps != 0 && !stops_early) {
      if (lane_ == 0) {
        const TensorMap& map = of_queries ? p_.q_map : part == kKeysOf ? p_.k_map : p_.v_map;
        mbarrier_expect(&barriers->full, panels * tile_rows * 128);
        const int seq = p_.cu_seqlens_q == nullptr ? work.seq : 0;
#pragma unroll 1
        for (int panel = 0; panel < panels; ++panel) {
          copy_box(to + panel * tile_rows * 128, &map, panel * kPanelColumns, static_cast<int>(first), head, seq,
                   &barriers->full);
        }
      } else {
        mbarrier_arrive(&barriers->full);
      }
      return;
    }
    const auto* data = static_cast<const std::uint16_t*>(from.data) + work.seq * from.stride_seq +
                       first * from.stride_token + head * from.stride_head;
#pragma unroll 1
    for (int i = lane_; i < tile_rows * panels * 8; i += kWaveSize) {
      const int row = i / (panels * 8), vector = i % (panels * 8);
      const bool valid = row < rows && vector * 8 < columns;
      const auto* source = data + (valid ? row * from.stride_token + vector * 8 : 0);
      unsigned char* at = to + vector / 8 * tile_rows * 128 + 2 * swizzled_offset(row, vector % 8);
      if (p_.has_maps != 0) {
        copy_async<16>(at, source, valid);
      } else {
#pragma unroll 1
        for (int j = 0; j < 8; ++j) reinterpret_cast<std::uint16_t*>(at)[j] = valid ? source[j] : 0;
      }
    }
    await_copies();
    fence_async_proxy();
    mbarrier_arrive(&barriers->full);
  }

  // Whether the values have rows from `token` on, which are another sequence's or not in use.
  FLASHPORT_DEVICE bool has_rows_after(std::int64_t token) const {
    return token < (p_.cu_seqlens_k != nullptr ? p_.total_k : p_.kv_len);
  }

  const AttentionParams& p_;
  const int lane_;
  Memory& memory_;
  const TileScheduler<kRows> scheduler_;
  PipelineState<kWorkStages> work_ = {kWorkStages - 1, 1};  // of what was sent last; none yet
  int queries_ = 0, keys_ = 0, values_ = 0;  // copies so far
};

}  // namespace flashport::FLASHPORT_TARGET::attention
