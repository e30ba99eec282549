// The producer warps that bring rows by cp.async: any, or aligned ones of the math type.
#pragma once

#include "cuda/attention/copies.h"
#include "cuda/attention/row_copies.h"

namespace flashport::FLASHPORT_TARGET::attention {

// A warp that brings rows: its share of all of them; or where boxes bring the others the last values, or the queries.
template <AttentionConfig kCfg>
class RowProducer {
  using Memory = AttentionMemory<kCfg>;
  static constexpr MathType kMath = kCfg.shape.math;
  static constexpr bool kWidens = has(kCfg.shape.sources, KeySources::kBytes);
  // Where others widen keys and values, those that come here are of the math type.
  static constexpr Widened kWidened = kWidens && stored_bytes(kCfg) == 0 ? Widened::kAll : Widened::kNothing;
  static constexpr int kKeys = kCfg.tuning.keys, kRows = kCfg.tuning.rows;
  static constexpr bool kScales = has(kCfg.shape.sources, KeySources::kScaled) && stored_bytes(kCfg) == 0;

 public:
  // `first_wave`: of the warps that share the rows.
  FLASHPORT_DEVICE RowProducer(const AttentionParams& p, const Block& block, Memory& memory, int first_wave = 1)
      : p_(p), lane_(block.lane()), warp_(block.wave() - first_wave), memory_(memory) {}

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
    const RowCopies<kMath, kWidened, kPanels, kKeys> copies(to, offsets, lane_, share());
    copies.find_rows(row_at);
    if constexpr (kScales) bring_factors<kOfValues>(work, tile);
    // The first keys come before the first values, and the page numbers of the second tile are not there yet.
    if (kOfValues) look_up(work, tile + 2);
    if (!kOfValues && copy == tiles_) look_up(work, tile + 1);
    copies.copy({cache.data, kOfValues ? p_.head_dim_v : p_.head_dim_qk, cache.row_bytes, cache.copy_unit,
                 kOfValues ? p_.v_format : p_.k_format});
    if constexpr (kScales) multiply_by_factors<kOfValues, kPanels * 8>(to);
    if (lane_ == 0) mbarrier_arrive(&barriers.full);
  }

  // Begins to copy the factors that lie beside the warp's rows of a tile; what the copy of its rows awaits includes
  // them.
  template <bool kOfValues>
  FLASHPORT_DEVICE void bring_factors(const WorkTile& work, int tile) const {
    const KeyScales& scales = kOfValues ? p_.v_row_scales : p_.k_row_scales;
    if (scales.data == nullptr) return;
    const Share rows = share();
#pragma unroll 1
    for (int i = lane_; rows.row(i) < kKeys; i += kWaveSize) {
      const int row = rows.row(i), key = tile * kKeys + row;
      const int page = p_.cache.table == nullptr ? work.seq : memory_.pages[tile % 2][row];
      const kv::TokenCoord token = {page, kv::page_coord(p_.cache, p_.cache.table, work.k_begin + key).offset};
      copy_factors(factor_rows(), row, scales, kOfValues ? p_.head_dim_v : p_.head_dim_qk, key < work.kv_len,
                   kv::scale_element(scales, token, work.head / p_.group_size));
    }
  }
  template <bool kOfValues, int kVectors>
  FLASHPORT_DEVICE void multiply_by_factors(unsigned char* tile) const {
    const KeyScales& scales = kOfValues ? p_.v_row_scales : p_.k_row_scales;
    if (scales.data == nullptr) return;
    const Share rows = share();
    multiply_rows<kVectors, kKeys>(tile, factor_rows(), scales, kOfValues ? p_.head_dim_v : p_.head_dim_qk, lane_,
                                   [&](int i) { return rows.row(i); });
    fence_async_proxy();
    __syncwarp();
  }
  FLASHPORT_DEVICE FactorRows factor_rows() const {
    return {memory_.factors.bytes, memory_.factors.begins, decltype(memory_.factors)::kPitch};
  }

 public:
  FLASHPORT_DEVICE void bring_queries(const WorkTile& work) { bring_queries(work, share()); }
  FLASHPORT_DEVICE void bring_queries(const WorkTile& work, Share share) {
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
    // Two warps that bring all queries have the registers for this.
    constexpr int kAtOnce = stored_bytes(kCfg) > 0 ? 4 : 1;
    const RowCopies<kMath, kWidens ? Widened::kQueries : Widened::kNothing, panels_of(kCfg.shape.head_dim_qk), kRows,
                    kAtOnce>
        copies(memory_.queries[0].x[0], memory_.offsets, lane_, share);
    copies.find_rows(row_at);
    copies.copy({p_.q.data, p_.head_dim_qk, p_.head_dim_qk * bytes, alignment % 16 == 0 ? 16 : 1, format});
    if (lane_ == 0) mbarrier_arrive(&memory_.query_barriers[0].full);
  }

 private:
  FLASHPORT_DEVICE Share share() const {
    if (by_rows()) return {warp_, row_warps(kCfg)};
    return {0, 1};
  }

  const AttentionParams& p_;
  const int lane_, warp_;
  Memory& memory_;
  int tiles_ = 0;
  int turns_ = 0;  // queries that were brought so far; where boxes bring keys, the warp's copies
};

// A warp that brings its share of all rows, where those of keys and values are of the math type and lie aligned to 16
// bytes. It looks up the page numbers of a tile while copies of the tile before are in flight, and completes a copy
// when the next one is in flight too, or while that has to wait for its stage.
template <AttentionConfig kCfg>
class AlignedRowProducer {
  using Memory = AttentionMemory<kCfg>;
  static constexpr int kKeys = kCfg.tuning.keys;
  static constexpr int kWarps = row_warps(kCfg);
  static constexpr int kRows = (kKeys / 8 + kWarps - 1) / kWarps * 8;  // of a tile, that the warp has at most
  static constexpr int kSlots = (kRows + kWaveSize - 1) / kWaveSize;   // of them, that a lane looks up

 public:
  FLASHPORT_DEVICE AlignedRowProducer(const AttentionParams& p, const Block& block, Memory& memory)
      : p_(p),
        lane_(block.lane()),
        share_{block.wave() - 1, kWarps},
        queries_(p, block, memory),
        memory_(memory),
        lie_alike_(p.has_q_map != 0 && p.cache.k.page_stride == p.cache.v.page_stride &&
                   p.cache.k.token_stride == p.cache.v.token_stride) {}

  FLASHPORT_DEVICE void bring(const WorkTile& work) {
    const Copies copies = copies_of<kCfg>(p_, work);
    if (copies.tiles == 0) return;
    const std::int32_t* pages = kv::page_list(p_.cache, work.seq);
    const int begin = copies.range.begin;
    int page[kSlots];
    look_up(work, pages, begin, page);
    find(work, p_.cache.k, begin, page, key_offsets(tiles_));
    if (!lie_alike_) find(work, p_.cache.v, begin, page, value_offsets(tiles_));
    __syncwarp();
    look_up(work, pages, begin + 1, page);
    copy_keys(work, tiles_);
    complete_keys<0>(tiles_);
    queries_.bring_queries(work);
#pragma unroll 1
    for (int i = 0; i < copies.tiles; ++i) {
      const bool has_next = i + 1 < copies.tiles;
      if (has_next) {
        __syncwarp();
        find(work, p_.cache.k, begin + i + 1, page, key_offsets(tiles_ + i + 1));
        __syncwarp();
        copy_keys(work, tiles_ + i + 1);
      }
      copy_values(work, tiles_ + i);
      if (has_next) {
        __syncwarp();
        if (!lie_alike_) find(work, p_.cache.v, begin + i + 1, page, value_offsets(tiles_ + i + 1));
        look_up(work, pages, begin + i + 2, page);
        complete_keys<1>(tiles_ + i + 1);
      }
      complete_values(tiles_ + i);
    }
    tiles_ += copies.tiles;
  }

 private:
  // The page numbers of the lane's keys of a tile.
  FLASHPORT_DEVICE void look_up(const WorkTile& work, const std::int32_t* pages, int tile, int (&page)[kSlots]) const {
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      const int row = share_.row(lane_ + slot * kWaveSize), key = tile * kKeys + row;
      page[slot] = work.seq;
      if (pages != nullptr && row < kKeys && key < work.kv_len) {
        page[slot] = load_global(pages + kv::page_coord(p_.cache, pages, work.k_begin + key).page);
      }
    }
  }
  // Their offsets from those of the head's first row.
  FLASHPORT_DEVICE void find(const WorkTile& work, const CacheParams& cache, int tile, const int (&page)[kSlots],
                             std::int64_t* offsets) const {
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      const int row = share_.row(lane_ + slot * kWaveSize), key = tile * kKeys + row;
      const kv::PageCoord at = kv::page_coord(p_.cache, p_.cache.table, work.k_begin + key);
      const kv::TokenCoord token = {page[slot], key < work.kv_len ? at.offset : -1};
      if (row < kKeys) offsets[row] = kv::row_offset(cache, token, 0);
    }
  }

  FLASHPORT_DEVICE void copy_keys(const WorkTile& work, int copy) const {
    begin_copy(memory_.keys, memory_.key_barriers, copy, head_rows(work, p_.cache.k, p_.head_dim_qk, p_.k_format),
               key_offsets(copy));
  }
  FLASHPORT_DEVICE void copy_values(const WorkTile& work, int copy) const {
    begin_copy(memory_.values, memory_.value_barriers, copy, head_rows(work, p_.cache.v, p_.head_dim_v, p_.v_format),
               value_offsets(copy));
  }
  // Where rows lie, of copy number `copy` of their kind. The values of a tile are copied after the keys of the next
  // one: where keys and values lie alike, each tile's offsets are found once, in the two places in turn.
  FLASHPORT_DEVICE std::int64_t* key_offsets(int copy) const {
    return lie_alike_ && copy % 2 == 1 ? memory_.value_offsets : memory_.offsets;
  }
  FLASHPORT_DEVICE std::int64_t* value_offsets(int copy) const {
    return lie_alike_ ? key_offsets(copy) : memory_.value_offsets;
  }
  template <int kLater>
  FLASHPORT_DEVICE void complete_keys(int copy) const {
    complete<kLater>(memory_.key_barriers, copy);
  }
  FLASHPORT_DEVICE void complete_values(int copy) const { complete<0>(memory_.value_barriers, copy); }
  FLASHPORT_DEVICE StoredRows head_rows(const WorkTile& work, const CacheParams& cache, int dims,
                                        KvFormat format) const {
    const std::int64_t head = work.head / p_.group_size * cache.head_stride;
    return {static_cast<const char*>(cache.data) + head, dims, cache.row_bytes, cache.copy_unit, format};
  }
  template <int kPanels>
  using TileCopies = RowCopies<kCfg.shape.math, Widened::kNothing, kPanels, kKeys>;

  template <int kPanels, int kCount>
  FLASHPORT_DEVICE void begin_copy(RowPanels<kPanels, kKeys> (&stages)[kCount], Barriers (&barriers)[kCount], int copy,
                                   const StoredRows& rows, std::int64_t* offsets) const {
    await_empty(barriers, copy);
    TileCopies<kPanels>(stages[copy % kCount].x[0], offsets, lane_, share_).begin(rows);
    commit_copies();
  }
  // A copy after which kLater others were begun.
  template <int kLater, int kCount>
  FLASHPORT_DEVICE void complete(Barriers (&barriers)[kCount], int copy) const {
    await_copy_groups<kLater>();
    fence_async_proxy();
    __syncwarp();
    if (lane_ == 0) mbarrier_arrive(&barriers[copy % kCount].full);
  }

  const AttentionParams& p_;
  const int lane_;
  const Share share_;
  RowProducer<kCfg> queries_;
  Memory& memory_;
  const bool lie_alike_;  // keys and values, and no queries come between their offsets
  int tiles_ = 0;
};

}  // namespace flashport::FLASHPORT_TARGET::attention
