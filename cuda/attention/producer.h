// The producer warps: one takes work tiles, three bring their queries, keys and values to shared memory.
//
// TMA brings whole boxes. Keys and values on pages, of fewer bits, or that are not aligned to 16 bytes come by rows
// (row_copies.h), a warp for each of both. So do the last values of a sequence, with zeros after them, where the tensor
// has other rows there: TMA would bring those, and 0 times NaN is NaN. Rows of keys and queries that are not the
// sequence's own do no harm: their scores are hidden, their outputs not stored.
//
// With two stages the time from an empty stage to the next copy into it is part of the loop's: so one lane alone brings
// boxes, and has nothing to decide. Warps that produce have few registers, because those that consume have many: so
// each of them has one task.
#pragma once

#include "common/device/attention/tile_scheduler.h"
#include "cuda/attention/row_copies.h"

namespace flashport::FLASHPORT_TARGET::attention {

// The warp that takes work tiles and tells the other warps.
template <AttentionConfig kCfg>
FLASHPORT_DEVICE void send_work_tiles(const AttentionParams& p, const Block& block, AttentionMemory<kCfg>& memory) {
  TileScheduler<kCfg.tuning.rows, kCfg.tuning.keys> scheduler(p, block);
  const int count = scheduler.count();
  PipelineState<kWorkStages> pipe;
  // fill(the work tile, which all lanes write alike)
  const auto send = [&](const auto& fill) {
    Barriers& barriers = memory.work_barriers[pipe.stage];
    mbarrier_wait(&barriers.empty, pipe.phase ^ 1);
    fill(memory.work[pipe.stage]);
    __syncwarp();
    if (block.lane() == 0) mbarrier_arrive(&barriers.full);
    pipe.next();
  };
  int index = static_cast<int>(blockIdx.x);
  while (index < count) {
    send([&](WorkTile& work) { scheduler.tile(index, work); });
    // All blocks together add `count` times: the last of them clears the counter for the next launch.
    unsigned taken = 0;
    if (block.lane() == 0) {
      taken = atomicAdd(p.counter, 1u);
      if (taken == static_cast<unsigned>(count) - 1) atomicExch(p.counter, 0u);
    }
    index = static_cast<int>(gridDim.x + __shfl_sync(~0u, taken, 0));
  }
  send([](WorkTile& work) { work.seq = -1; });
}

// What there is to copy for a work tile.
struct Copies {
  KeyTiles range;
  int tiles;
  bool last_by_rows;  // the last values, where all others come by boxes
};
template <AttentionConfig kCfg>
FLASHPORT_DEVICE Copies copies_of(const AttentionParams& p, const WorkTile& work) {
  constexpr int kKeys = kCfg.tuning.keys;
  Copies copies;
  copies.range = key_tiles<kKeys>(p, work, kCfg.tuning.rows);
  copies.tiles = maximum(copies.range.end - copies.range.begin, 0);
  const std::int64_t extent = p.cu_seqlens_k != nullptr ? p.total_k : p.kv_len;
  copies.last_by_rows = copies.range.end * kKeys > work.kv_len && work.k_begin + work.kv_len < extent;
  return copies;
}

template <int kCount>
FLASHPORT_DEVICE void await_empty(Barriers (&barriers)[kCount], int copy) {
  mbarrier_wait(&barriers[copy % kCount].empty, static_cast<unsigned>(copy / kCount) & 1 ^ 1);
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
    if (copies.tiles == 0) return;
    const int kv_seq = p_.cu_seqlens_k == nullptr ? work.seq : 0, kv_head = work.head / p_.group_size;
    const int first_key = static_cast<int>(work.k_begin) + copies.range.begin * kKeys;
    const auto keys = [&](int i) {
      bring_box(memory_.keys, memory_.key_barriers, tiles_ + i, p_.k_map, first_key + i * kKeys, kv_head, kv_seq);
    };
    // The stage of the first keys is free sooner than that of the queries.
    if (p_.has_kv_maps != 0) keys(0);
    if (p_.has_q_map != 0) {
      bring_box(memory_.queries, memory_.query_barriers, queries_, p_.q_map,
                static_cast<int>(work.q_begin) + work.first_row, work.head, p_.cu_seqlens_q == nullptr ? work.seq : 0);
    }
    queries_ += 1;
    if (p_.has_kv_maps == 0) return;
#pragma unroll 1
    for (int i = 0; i < copies.tiles; ++i) {
      if (i + 1 < copies.tiles) keys(i + 1);
      if (i + 1 == copies.tiles && copies.last_by_rows) {
        hand_over(tiles_ + i);
      } else {
        bring_box(memory_.values, memory_.value_barriers, tiles_ + i, p_.v_map, first_key + i * kKeys, kv_head, kv_seq);
      }
    }
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

// A warp that brings rows: those of keys, and of queries that are no boxes; or those of values.
template <AttentionConfig kCfg, bool kOfValues>
class RowProducer {
  using Memory = AttentionMemory<kCfg>;
  static constexpr MathType kMath = kCfg.shape.math;
  static constexpr bool kWidens = has(kCfg.shape.sources, KeySources::kBytes);
  static constexpr int kKeys = kCfg.tuning.keys, kRows = kCfg.tuning.rows, kStages = kCfg.tuning.stages;

 public:
  FLASHPORT_DEVICE RowProducer(const AttentionParams& p, const Block& block, Memory& memory)
      : p_(p), lane_(block.lane()), memory_(memory) {}

  FLASHPORT_DEVICE void bring(const WorkTile& work) {
    const Copies copies = copies_of<kCfg>(p_, work);
    if (copies.tiles == 0) return;
    const bool by_rows = p_.has_kv_maps == 0;
    int tile = copies.range.begin;
    if (by_rows) {
      look_up(work, tile);
      await_copies();
    }
    if constexpr (kOfValues) {
      if (by_rows) {
#pragma unroll 1
        for (; tile < copies.range.end; ++tile, ++tiles_) {
          await_empty(memory_.value_barriers, tiles_);
          bring_keys(work, tile);
        }
        return;
      }
      tiles_ += copies.tiles;
      if (!copies.last_by_rows) return;
      // A barrier's phases must be waited for one by one: the lane that brings boxes does that for all values.
      mbarrier_wait(&memory_.row_barriers.full, row_phase_);
      __syncwarp();
      row_phase_ ^= 1;
      if (lane_ == 0) mbarrier_arrive(&memory_.row_barriers.empty);
      --tiles_;
      bring_keys(work, copies.range.end - 1);
      ++tiles_;
    } else {
      // The stage of the first keys is free sooner than that of the queries.
      bool has_queries = p_.has_q_map != 0;
#pragma unroll 1
      while (true) {
        if (by_rows) {
          await_empty(memory_.key_barriers, tiles_);
          bring_keys(work, tile);
          ++tiles_;
        }
        if (!has_queries) bring_queries(work);
        has_queries = true;
        if (!by_rows || ++tile == copies.range.end) break;
      }
      ++queries_;
    }
  }

 private:
  // Begins to copy the page numbers of the lane's keys of a tile, every 32nd, to shared memory.
  FLASHPORT_DEVICE void look_up(const WorkTile& work, int tile) {
    const std::int32_t* pages = kv::page_list(p_.cache, work.seq);
    if (pages == nullptr) return;
#pragma unroll 1
    for (int key = lane_; key < kKeys && tile * kKeys + key < work.kv_len; key += kWaveSize) {
      const int token = static_cast<int>(work.k_begin) + tile * kKeys + key;
      copy_async<4>(&memory_.pages[kOfValues][key], pages + kv::page_coord(p_.cache, pages, token).page, true);
    }
  }

  // Keys or values, whose page numbers were looked up, as copy number tiles_. Looks up those of the next tile.
  FLASHPORT_DEVICE void bring_keys(const WorkTile& work, int tile) {
    constexpr int kPanels = panels_of(kOfValues ? kCfg.shape.head_dim_v : kCfg.shape.head_dim_qk);
    const CacheParams& cache = kOfValues ? p_.cache.v : p_.cache.k;
    const KvFormat format = kOfValues ? p_.v_format : p_.k_format;
    const auto row_at = [&](int row) {
      const int key = tile * kKeys + row;
      const kv::PageCoord at = kv::page_coord(p_.cache, p_.cache.table, static_cast<int>(work.k_begin) + key);
      const int page = p_.cache.table == nullptr ? work.seq : memory_.pages[kOfValues][row];
      const kv::TokenCoord token = {page, key < work.kv_len ? at.offset : -1};
      return kv::row_offset(cache, token, work.head / p_.group_size);
    };
    Barriers& barriers = (kOfValues ? memory_.value_barriers : memory_.key_barriers)[tiles_ % kStages];
    unsigned char* to = nullptr;
    std::int64_t* offsets = memory_.value_offsets;
    if constexpr (kOfValues) {
      to = memory_.values[tiles_ % kStages].x[0];
    } else {
      to = memory_.keys[tiles_ % kStages].x[0];
      offsets = memory_.key_offsets;
    }
    const RowCopies<kMath, kWidens, kPanels, kKeys> copies(to, offsets, lane_);
    copies.find_rows(row_at);
    look_up(work, tile + 1);
    copies.copy(cache.data, kOfValues ? p_.head_dim_v : p_.head_dim_qk,
                kWidens && format == KvFormat::kFp8E4M3 ? Stored::kFp8 : Stored::kOwn,
                cache.copy_unit == 16 && cache.row_bytes % 16 == 0);
    if (lane_ == 0) mbarrier_arrive(&barriers.full);
  }

  FLASHPORT_DEVICE void bring_queries(const WorkTile& work) {
    await_empty(memory_.query_barriers, queries_);
    constexpr DType kOwn = kMath == MathType::kBf16 ? DType::kBFloat16 : DType::kFloat16;
    const Stored stored = !kWidens || p_.q.dtype == kOwn  ? Stored::kOwn
                          : p_.q.dtype == DType::kFp8E4M3 ? Stored::kFp8
                                                          : Stored::kBf16;
    const int bytes = stored == Stored::kFp8 ? 1 : 2;
    const auto row_at = [&](int row) {
      const std::int64_t at = work.seq * p_.q.stride_seq + (work.q_begin + work.first_row + row) * p_.q.stride_token +
                              work.head * p_.q.stride_head;
      return work.first_row + row < work.q_len ? at * bytes : std::int64_t{-1};
    };
    const auto alignment =
        reinterpret_cast<std::uintptr_t>(p_.q.data) |
        static_cast<std::uintptr_t>((p_.q.stride_seq | p_.q.stride_token | p_.q.stride_head) * bytes);
    const bool aligned = (alignment | static_cast<std::uintptr_t>(p_.head_dim_qk * bytes)) % 16 == 0;
    const RowCopies<kMath, kWidens, panels_of(kCfg.shape.head_dim_qk), kRows> copies(memory_.queries[0].x[0],
                                                                                     memory_.key_offsets, lane_);
    copies.find_rows(row_at);
    copies.copy(p_.q.data, p_.head_dim_qk, stored, aligned);
    if (lane_ == 0) mbarrier_arrive(&memory_.query_barriers[0].full);
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
    while (true) {
      const WorkTile& work = tiles.receive();
      if (work.seq < 0) break;
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
    RowProducer<kCfg, false> keys(p, block, memory);
    for_each_work_tile(keys, p.has_q_map == 0 || p.has_kv_maps == 0);
  } else {
    RowProducer<kCfg, true> values(p, block, memory);
    for_each_work_tile(values, true);
  }
}

}  // namespace flashport::FLASHPORT_TARGET::attention
