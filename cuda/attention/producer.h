// The producer warps: one takes work tiles, two bring their queries, keys and values to shared memory.
//
// TMA brings whole boxes. The last values of a sequence come by cp.async with zeros after them, where the tensor has
// other rows there: TMA would bring those, and 0 times NaN is NaN. Rows of keys and queries that are not the sequence's
// own do no harm: their scores are hidden, their outputs not stored. Tensors that TMA cannot read (rows that are not
// aligned to 16 bytes) come by copies of elements.
//
// With two stages the time from an empty stage to the next copy into it is part of the loop's: so one lane alone brings
// boxes, and has nothing to decide. Warps that produce have few registers, because those that consume have many: so
// each of them has one task.
#pragma once

#include "common/device/attention/tile_scheduler.h"
#include "cuda/attention/memory.h"

namespace flashport::FLASHPORT_TARGET::attention {

// The warp that takes work tiles and tells the other warps.
template <AttentionConfig kCfg>
FLASHPORT_DEVICE void send_work_tiles(const AttentionParams& p, const Block& block, AttentionMemory<kCfg>& memory) {
  TileScheduler<kCfg.tuning.rows> scheduler(p, block);
  const int count = scheduler.count();
  PipelineState<kWorkStages> pipe;
  const auto send = [&](const WorkTile& work) {
    Barriers& barriers = memory.work_barriers[pipe.stage];
    mbarrier_wait(&barriers.empty, pipe.phase ^ 1);
    if (block.lane() == 0) {
      memory.work[pipe.stage] = work;
      mbarrier_arrive(&barriers.full);
    }
    pipe.next();
  };
  int index = static_cast<int>(blockIdx.x);
  while (index < count) {
    send(scheduler.tile(index));
    // All blocks together add `count` times: the last of them clears the counter for the next launch.
    unsigned taken = 0;
    if (block.lane() == 0) {
      taken = atomicAdd(p.counter, 1u);
      if (taken == static_cast<unsigned>(count) - 1) atomicExch(p.counter, 0u);
    }
    index = static_cast<int>(gridDim.x + __shfl_sync(~0u, taken, 0));
  }
  WorkTile none = {};
  none.seq = -1;
  send(none);
}

// Which copies of a work tile are boxes. Copies are numbered: the first keys, whose stage is free sooner than that of
// the queries; the queries; then the keys of each tile before the values of the tile before it.
struct Copies {
  KeyTiles range;
  int tiles, boxes, all;
};
template <AttentionConfig kCfg>
FLASHPORT_DEVICE Copies copies_of(const AttentionParams& p, const WorkTile& work) {
  constexpr int kKeys = kCfg.tuning.keys;
  Copies copies;
  copies.range = key_tiles<kKeys>(p, work, kCfg.tuning.rows);
  copies.tiles = maximum(copies.range.end - copies.range.begin, 0);
  copies.all = copies.tiles > 0 ? 2 * copies.tiles + 1 : 0;
  const std::int64_t extent = p.cu_seqlens_k != nullptr ? p.total_k : p.kv_len;
  const bool stops_early = copies.range.end * kKeys > work.kv_len && work.k_begin + work.kv_len < extent;
  copies.boxes = p.has_maps == 0 ? 0 : stops_early ? copies.all - 1 : copies.all;
  return copies;
}

// The lane that brings boxes.
template <AttentionConfig kCfg>
class BoxProducer {
  using Memory = AttentionMemory<kCfg>;
  static constexpr int kKeys = kCfg.tuning.keys;

 public:
  FLASHPORT_DEVICE BoxProducer(const AttentionParams& p, Memory& memory) : p_(p), memory_(memory) {}

  FLASHPORT_DEVICE void bring(const WorkTile& work) {
    const Copies copies = copies_of<kCfg>(p_, work);
    if (copies.boxes > 0) {
      const int seq = p_.cu_seqlens_q == nullptr ? work.seq : 0, kv_head = work.head / p_.group_size;
      const int first_key = static_cast<int>(work.k_begin) + copies.range.begin * kKeys;
      const auto keys = [&](int i) {
        bring_box(memory_.keys, memory_.key_barriers, tiles_ + i, p_.k_map, first_key + i * kKeys, kv_head, seq);
      };
      keys(0);
      bring_box(memory_.queries, memory_.query_barriers, queries_, p_.q_map,
                static_cast<int>(work.q_begin) + work.first_row, work.head, seq);
#pragma unroll 1
      for (int i = 0; i < copies.tiles; ++i) {
        if (i + 1 < copies.tiles) keys(i + 1);
        if (2 * i + 3 > copies.boxes) {
          hand_over(tiles_ + i);
        } else {
          bring_box(memory_.values, memory_.value_barriers, tiles_ + i, p_.v_map, first_key + i * kKeys, kv_head, seq);
        }
      }
    }
    queries_ += copies.tiles > 0 ? 1 : 0;
    tiles_ += copies.tiles;
  }

 private:
  // Values number `copy` come by rows, into a stage that is empty.
  FLASHPORT_DEVICE void hand_over(int copy) {
    await_empty(memory_.value_barriers, copy);
    mbarrier_wait(&memory_.row_barriers.empty, row_phase_ ^ 1);
    row_phase_ ^= 1;
    mbarrier_arrive(&memory_.row_barriers.full);
  }

  template <int kCount>
  FLASHPORT_DEVICE static void await_empty(Barriers (&barriers)[kCount], int copy) {
    mbarrier_wait(&barriers[copy % kCount].empty, static_cast<unsigned>(copy / kCount) & 1 ^ 1);
  }

  // Copy number `copy` of its kind.
  template <int kPanels, int kTileRows, int kCount>
  FLASHPORT_DEVICE static void bring_box(RowPanels<kPanels, kTileRows> (&stages)[kCount], Barriers (&barriers)[kCount],
                                         int copy, const TensorMap& map, int first, int head, int seq) {
    const int stage = copy % kCount;
    await_empty(barriers, copy);
    mbarrier_expect(&barriers[stage].full, RowPanels<kPanels, kTileRows>::kBytes);
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      copy_box(stages[stage].x[panel], &map, panel * kPanelColumns, first, head, seq, &barriers[stage].full);
    }
  }

  const AttentionParams& p_;
  Memory& memory_;
  int queries_ = 0, tiles_ = 0;  // work tiles and key tiles that were brought so far
  unsigned row_phase_ = 0;
};

// The warp that brings what is no box, with zeros after the rows of the sequence.
template <AttentionConfig kCfg>
class RowProducer {
  using Memory = AttentionMemory<kCfg>;
  static constexpr int kKeys = kCfg.tuning.keys, kRows = kCfg.tuning.rows;

 public:
  FLASHPORT_DEVICE RowProducer(const AttentionParams& p, const Block& block, Memory& memory)
      : p_(p), lane_(block.lane()), memory_(memory) {}

  FLASHPORT_DEVICE void bring(const WorkTile& work) {
    const Copies copies = copies_of<kCfg>(p_, work);
#pragma unroll 1
    for (int copy = copies.boxes; copy < copies.all; ++copy) {
      const bool of_keys = copy == 0 || (copy % 2 == 0 && copy < 2 * copies.tiles);
      const Part part = copy == 1 ? kQueries : of_keys ? kKeysOf : kValuesOf;
      const int tile = copy == 2 * copies.tiles ? copies.tiles - 1 : of_keys ? copy / 2 : copy / 2 - 1;
      copy_rows(work, part, copies.range.begin + tile, part == kQueries ? queries_ : tiles_ + tile);
    }
    queries_ += copies.tiles > 0 ? 1 : 0;
    tiles_ += copies.tiles;
  }

 private:
  enum Part { kKeysOf, kValuesOf, kQueries };

  // Copy number `copy` of its kind.
  FLASHPORT_DEVICE void copy_rows(const WorkTile& work, Part part, int tile, int copy) {
    const bool of_queries = part == kQueries;
    const StridedRows& from = of_queries ? p_.q : part == kKeysOf ? p_.k : p_.v;
    const int columns = part == kValuesOf ? p_.head_dim_v : p_.head_dim_qk;
    const int head = of_queries ? work.head : work.head / p_.group_size;
    const std::int64_t first = of_queries ? work.q_begin + work.first_row : work.k_begin + tile * kKeys;
    const int tile_rows = of_queries ? kRows : kKeys;
    const int rows = minimum(of_queries ? work.q_len - work.first_row : work.kv_len - tile * kKeys, tile_rows);
    const int panels = part == kValuesOf ? panels_of(kCfg.shape.head_dim_v) : panels_of(kCfg.shape.head_dim_qk);
    const int stages = of_queries ? kQueryStages : kCfg.tuning.stages;
    const int stage = copy % stages;
    Barriers* barriers = part == kQueries  ? memory_.query_barriers + stage
                         : part == kKeysOf ? memory_.key_barriers + stage
                                           : memory_.value_barriers + stage;
    unsigned char* to = part == kQueries  ? memory_.queries[stage].x[0]
                        : part == kKeysOf ? memory_.keys[stage].x[0]
                                          : memory_.values[stage].x[0];
    // A barrier's phases must be waited for one by one: where boxes come too, their lane does that for all copies.
    if (p_.has_maps != 0) {
      mbarrier_wait(&memory_.row_barriers.full, row_phase_);
      __syncwarp();
      row_phase_ ^= 1;
      if (lane_ == 0) mbarrier_arrive(&memory_.row_barriers.empty);
    } else {
      mbarrier_wait(&barriers->empty, static_cast<unsigned>(copy / stages) & 1 ^ 1);
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
    __syncwarp();
    if (lane_ == 0) mbarrier_arrive(&barriers->full);
  }

  const AttentionParams& p_;
  const int lane_;
  Memory& memory_;
  int queries_ = 0, tiles_ = 0;  // work tiles and key tiles that were brought so far
  unsigned row_phase_ = 0;
};

// What each of the producer warps does.
template <AttentionConfig kCfg>
FLASHPORT_DEVICE void produce(const AttentionParams& p, const Block& block, AttentionMemory<kCfg>& memory) {
  const auto for_each_work_tile = [&](auto& producer, bool works) {
    WorkTiles<kCfg> tiles(memory);
    WorkTile work;
    while (tiles.receive(work)) {
      if (works) producer.bring(work);
      tiles.release();
    }
  };
  if (block.wave() == 0) {
    send_work_tiles<kCfg>(p, block, memory);
  } else if (block.wave() == 1) {
    BoxProducer<kCfg> boxes(p, memory);
    for_each_work_tile(boxes, block.lane() == 0);
  } else if (block.wave() == 2) {
    RowProducer<kCfg> rows(p, block, memory);
    for_each_work_tile(rows, true);
  }
}

}  // namespace flashport::FLASHPORT_TARGET::attention
