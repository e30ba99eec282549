// The producer warps: one takes work tiles, three bring their queries, keys and values to shared memory.
//
// TMA brings whole boxes: a tile of a tensor, or of a page what falls into a tile, which is eight rows or more. All
// else comes by rows (row_copies.h), of which each of the three warps copies a third: keys and values on smaller pages,
// of fewer bits, or not aligned to 16 bytes. So do the last values of a sequence, with zeros after them, where the
// tensor has other rows there: TMA would bring those, and 0 times NaN is NaN. Rows of keys and queries that are not the
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

// What there is to copy for a work tile. Copies are numbered: the first keys, whose stage is free sooner than that of
// the queries; the queries; then the keys of each tile before the values of the tile before it.
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
  const bool others_follow = p.cache.table != nullptr || work.k_begin + work.kv_len < extent;
  copies.last_by_rows = copies.range.end * kKeys > work.kv_len && others_follow;
  return copies;
}

template <int kCount>
FLASHPORT_DEVICE void await_empty(Barriers (&barriers)[kCount], int copy) {
  mbarrier_wait(&barriers[copy % kCount].empty, static_cast<unsigned>(copy / kCount) & 1 ^ 1);
}

// Brings a tile as one box for each panel, as copy number `copy` of its kind.
template <int kPanels, int kTileRows, int kCount>
FLASHPORT_DEVICE void bring_box(RowPanels<kPanels, kTileRows> (&stages)[kCount], Barriers (&barriers)[kCount], int copy,
                                const TensorMap& map, int first, int head, int seq) {
  const int stage = copy % kCount;
  await_empty(barriers, copy);
  mbarrier_expect(&barriers[stage].full, RowPanels<kPanels, kTileRows>::kBytes);
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel) {
    copy_box(stages[stage].x[panel], &map, panel * kPanelColumns, first, head, seq, &barriers[stage].full);
  }
}
template <AttentionConfig kCfg>
FLASHPORT_DEVICE void bring_query_box(const AttentionParams& p, AttentionMemory<kCfg>& memory, const WorkTile& work,
                                      int copy) {
  bring_box(memory.queries, memory.query_barriers, copy, p.q_map, work.q_begin + work.first_row, work.head,
            p.cu_seqlens_q == nullptr ? work.seq : 0);
}
// Values number `copy` come by rows, into a stage that is empty.
template <AttentionConfig kCfg>
FLASHPORT_DEVICE void hand_over_values(AttentionMemory<kCfg>& memory, int copy, unsigned& phase) {
  await_empty(memory.value_barriers, copy);
  mbarrier_wait(&memory.row_barriers.empty, phase ^ 1);
  phase ^= 1;
  mbarrier_arrive(&memory.row_barriers.full);
}

// The lane that brings boxes of tensors.
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
    const int first_key = work.k_begin + copies.range.begin * kKeys;
    const auto keys = [&](int i) {
      bring_box(memory_.keys, memory_.key_barriers, tiles_ + i, p_.k_map, first_key + i * kKeys, kv_head, kv_seq);
    };
    keys(0);
    if (p_.has_q_map != 0) bring_query_box<kCfg>(p_, memory_, work, queries_);
    queries_ += 1;
#pragma unroll 1
    for (int i = 0; i < copies.tiles; ++i) {
      if (i + 1 < copies.tiles) keys(i + 1);
      if (i + 1 == copies.tiles && copies.last_by_rows) {
        hand_over_values<kCfg>(memory_, tiles_ + i, row_phase_);
      } else {
        bring_box(memory_.values, memory_.value_barriers, tiles_ + i, p_.v_map, first_key + i * kKeys, kv_head, kv_seq);
      }
    }
    tiles_ += copies.tiles;
  }

 private:
  const AttentionParams& p_;
  Memory& memory_;
  int queries_ = 0, tiles_ = 0;  // work tiles and key tiles that were brought so far
  unsigned row_phase_ = 0;
};

// The warp that brings boxes of pages: lane b those of box_keys keys from key b * box_keys of a tile on. Boxes after
// the sequence's last key are left out.
template <AttentionConfig kCfg>
class PageProducer {
  using Memory = AttentionMemory<kCfg>;
  static constexpr int kKeys = kCfg.tuning.keys;

 public:
  FLASHPORT_DEVICE PageProducer(const AttentionParams& p, const Block& block, Memory& memory)
      : p_(p), lane_(block.lane()), memory_(memory) {}

  FLASHPORT_DEVICE void bring(const WorkTile& work) {
    const Copies copies = copies_of<kCfg>(p_, work);
    if (copies.tiles == 0) return;
    const int begin = copies.range.begin;
    int page = page_of(work, begin), next_page = page_of(work, begin + 1);
    bring_boxes(memory_.keys, memory_.key_barriers, tiles_, p_.k_map, work, begin, page);
    if (p_.has_q_map != 0 && lane_ == 0) bring_query_box<kCfg>(p_, memory_, work, queries_);
    queries_ += 1;
#pragma unroll 1
    for (int i = 0; i < copies.tiles; ++i) {
      const int values_page = page;
      page = next_page;
      if (i + 1 < copies.tiles) {
        next_page = page_of(work, begin + i + 2);
        bring_boxes(memory_.keys, memory_.key_barriers, tiles_ + i + 1, p_.k_map, work, begin + i + 1, page);
      }
      if (i + 1 < copies.tiles || !copies.last_by_rows) {
        bring_boxes(memory_.values, memory_.value_barriers, tiles_ + i, p_.v_map, work, begin + i, values_page);
      } else if (lane_ == 0) {
        hand_over_values<kCfg>(memory_, tiles_ + i, row_phase_);
      }
    }
    __syncwarp();
    tiles_ += copies.tiles;
  }

 private:
  // The page of the lane's keys of a tile.
  FLASHPORT_DEVICE int page_of(const WorkTile& work, int tile) const {
    const int key = tile * kKeys + lane_ * p_.box_keys;
    if (lane_ * p_.box_keys >= kKeys || key >= work.kv_len) return 0;
    const std::int32_t* pages = kv::page_list(p_.cache, work.seq);
    return load_global(pages + kv::page_coord(p_.cache, pages, key).page);
  }

  template <int kPanels, int kCount>
  FLASHPORT_DEVICE void bring_boxes(RowPanels<kPanels, kKeys> (&stages)[kCount], Barriers (&barriers)[kCount], int copy,
                                    const TensorMap& map, const WorkTile& work, int tile, int page) const {
    const int stage = copy % kCount, row = lane_ * p_.box_keys;
    const int rows = minimum(work.kv_len - tile * kKeys, kKeys), boxes = (rows + p_.box_keys - 1) / p_.box_keys;
    await_empty(barriers, copy);
    if (lane_ == 0) mbarrier_expect(&barriers[stage].full, boxes * p_.box_keys * 128 * kPanels);
    __syncwarp();
    if (lane_ >= boxes) return;
    const int first = kv::page_coord(p_.cache, p_.cache.table, tile * kKeys + row).offset;
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      copy_box(stages[stage].x[panel] + row * 128, &map, panel * kPanelColumns, first, work.head / p_.group_size, page,
               &barriers[stage].full);
    }
  }

  const AttentionParams& p_;
  const int lane_;
  Memory& memory_;
  int queries_ = 0, tiles_ = 0;
  unsigned row_phase_ = 0;
};

// A warp that brings rows: its share of all of them; or where boxes bring the others the last values, or the queries.
template <AttentionConfig kCfg>
class RowProducer {
  using Memory = AttentionMemory<kCfg>;
  static constexpr MathType kMath = kCfg.shape.math;
  static constexpr bool kWidens = has(kCfg.shape.sources, KeySources::kBytes);
  static constexpr int kKeys = kCfg.tuning.keys, kRows = kCfg.tuning.rows;

 public:
  FLASHPORT_DEVICE RowProducer(const AttentionParams& p, const Block& block, Memory& memory)
      : p_(p), lane_(block.lane()), warp_(block.wave() - 1), memory_(memory) {}

  FLASHPORT_DEVICE void bring(const WorkTile& work) {
    const Copies copies = copies_of<kCfg>(p_, work);
    if (copies.tiles == 0) return;
    const int last = 2 * copies.tiles;
    int copy = by_rows() ? 0 : 1;
    if (!by_rows() && warp_ == 1) copy = copies.last_by_rows ? last : last + 1;
    if (by_rows() || copy == last) {
      look_up(work, by_rows() ? copies.range.begin : copies.range.end - 1);
      await_copies();
    }
#pragma unroll 1
    while (bring_copy(work, copy)) ++copy;
    tiles_ += copies_of<kCfg>(p_, work).tiles;
  }

 private:
  // Copy number `copy`, and whether there is a next one. What it needs to know of the work tile is computed anew, and
  // takes no registers in between.
  FLASHPORT_DEVICE bool bring_copy(const WorkTile& work, int copy) {
    const Copies copies = copies_of<kCfg>(p_, work);
    const int last = 2 * copies.tiles;
    if (copy > last) return false;
    if (copy == 1) {
      bring_queries(work);
    } else if (copy == 0 || (copy % 2 == 0 && copy < last)) {
      bring_keys<false>(work, copies.range.begin + copy / 2, tiles_ + copy / 2);
    } else {
      const int i = copy == last ? copies.tiles - 1 : copy / 2 - 1;
      bring_keys<true>(work, copies.range.begin + i, tiles_ + i);
    }
    return by_rows();
  }
  FLASHPORT_DEVICE bool by_rows() const { return p_.has_kv_maps == 0; }

  // Begins to copy the page numbers of the warp's keys of a tile to shared memory.
  FLASHPORT_DEVICE void look_up(const WorkTile& work, int tile) {
    const std::int32_t* pages = kv::page_list(p_.cache, work.seq);
    if (pages == nullptr) return;
    const Share rows = share();
#pragma unroll 1
    for (int i = lane_; true; i += kWaveSize) {
      const int row = rows.row(i), key = tile * kKeys + row;
      if (row >= kKeys || key >= work.kv_len) return;
      copy_async<4>(&memory_.pages[tile % 2][row], pages + kv::page_coord(p_.cache, pages, work.k_begin + key).page,
                    true);
    }
  }

  // Keys or values, whose page numbers were looked up, as copy number `copy` of their kind. Looks up those of the tile
  // whose keys come next.
  template <bool kOfValues>
  FLASHPORT_DEVICE void bring_keys(const WorkTile& work, int tile, int copy) {
    constexpr int kPanels = panels_of(kOfValues ? kCfg.shape.head_dim_v : kCfg.shape.head_dim_qk);
    const CacheParams& cache = kOfValues ? p_.cache.v : p_.cache.k;
    const auto row_at = [&](int row) {
      const int key = tile * kKeys + row;
      const kv::PageCoord at = kv::page_coord(p_.cache, p_.cache.table, work.k_begin + key);
      const int page = p_.cache.table == nullptr ? work.seq : memory_.pages[tile % 2][row];
      const kv::TokenCoord token = {page, key < work.kv_len ? at.offset : -1};
      return kv::row_offset(cache, token, work.head / p_.group_size);
    };
    constexpr int kStages = kOfValues ? value_stages(kCfg.tuning) : kCfg.tuning.stages;
    Barriers& barriers = (kOfValues ? memory_.value_barriers : memory_.key_barriers)[copy % kStages];
    unsigned char* to = nullptr;
    std::int64_t* offsets = memory_.offsets;
    if constexpr (kOfValues) {
      offsets = memory_.value_offsets;
      to = memory_.values[copy % kStages].x[0];
    } else {
      to = memory_.keys[copy % kStages].x[0];
    }
    if (by_rows()) {
      mbarrier_wait(&barriers.empty, static_cast<unsigned>(copy / kStages) & 1 ^ 1);
    } else {
      // A barrier's phases must be waited for one by one: the lane that brings boxes does that for all values.
      mbarrier_wait(&memory_.row_barriers.full, static_cast<unsigned>(turns_) & 1);
      __syncwarp();
      ++turns_;
      if (lane_ == 0) mbarrier_arrive(&memory_.row_barriers.empty);
    }
    const RowCopies<kMath, kWidens, kPanels, kKeys> copies(to, offsets, lane_, share());
    copies.find_rows(row_at);
    // The first keys come before the first values, and the page numbers of the second tile are not there yet.
    if (kOfValues) look_up(work, tile + 2);
    if (!kOfValues && copy == tiles_) look_up(work, tile + 1);
    copies.copy({cache.data, kOfValues ? p_.head_dim_v : p_.head_dim_qk, cache.row_bytes, cache.copy_unit,
                 kOfValues ? p_.v_format : p_.k_format});
    if (lane_ == 0) mbarrier_arrive(&barriers.full);
  }

  FLASHPORT_DEVICE void bring_queries(const WorkTile& work) {
    if (p_.has_q_map != 0) {
      if (warp_ == 0 && lane_ == 0) bring_query_box<kCfg>(p_, memory_, work, turns_);
      ++turns_;
      return;
    }
    await_empty(memory_.query_barriers, turns_);
    ++turns_;
    const KvFormat format = p_.q.dtype == DType::kFloat16    ? KvFormat::kFp16
                            : p_.q.dtype == DType::kBFloat16 ? KvFormat::kBf16
                                                             : KvFormat::kFp8E4M3;
    const int bytes = kWidens && format == KvFormat::kFp8E4M3 ? 1 : 2;
    const auto row_at = [&](int row) {
      const std::int64_t at = work.seq * p_.q.stride_seq +
                              std::int64_t{work.q_begin + work.first_row + row} * p_.q.stride_token +
                              work.head * p_.q.stride_head;
      return work.first_row + row < work.q_len ? at * bytes : std::int64_t{-1};
    };
    const auto alignment =
        reinterpret_cast<std::uintptr_t>(p_.q.data) |
        static_cast<std::uintptr_t>((p_.q.stride_seq | p_.q.stride_token | p_.q.stride_head | p_.head_dim_qk) * bytes);
    const RowCopies<kMath, kWidens, panels_of(kCfg.shape.head_dim_qk), kRows> copies(memory_.queries[0].x[0],
                                                                                     memory_.offsets, lane_, share());
    copies.find_rows(row_at);
    copies.copy({p_.q.data, p_.head_dim_qk, p_.head_dim_qk * bytes, alignment % 16 == 0 ? 16 : 1, format});
    if (lane_ == 0) mbarrier_arrive(&memory_.query_barriers[0].full);
  }

  FLASHPORT_DEVICE Share share() const {
    if (by_rows()) return {warp_, kRowWarps};
    return {0, 1};
  }

  const AttentionParams& p_;
  const int lane_, warp_;
  Memory& memory_;
  int tiles_ = 0;
  int turns_ = 0;  // queries that were brought so far; where boxes bring keys, the warp's copies
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
  } else if (block.wave() > 1 || p.has_kv_maps == 0) {
    RowProducer<kCfg> rows(p, block, memory);
    for_each_work_tile(rows, true);
  } else if (p.cache.table != nullptr) {
    PageProducer<kCfg> pages(p, block, memory);
    for_each_work_tile(pages, true);
  } else {
    BoxProducer<kCfg> boxes(p, memory);
    for_each_work_tile(boxes, block.lane() == 0);
  }
}

}  // namespace flashport::FLASHPORT_TARGET::attention
