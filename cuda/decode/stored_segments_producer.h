// The producer waves of kernels that read segments of blocks and of 16 bits as they are stored: as kv_producer.h, but
// each turn is of one segment, whose rows are those of its format. All teams share out the rows of each tile, of all of
// their heads or of the one that the first team works on, so a tile has rows of one format whichever team reads it.
#pragma once

#include "cuda/decode/kv_producer.h"

namespace flashport::FLASHPORT_TARGET::decode {

template <DecodeConfig kCfg, Sharing kSharing, class Shared>
class StoredSegmentsProducer {
  using Params = SegmentsDecodeParams;
  static_assert(kSharing != Sharing::kNone);
  static constexpr int kTeams = kCfg.tuning.teams, kTurnTiles = turn_tiles(kCfg);
  static constexpr int kHeads = kSharing == Sharing::kRows ? kTeams : 1;  // that a copy of a row has
  static constexpr int kLookAhead = KvRing<kCfg>::kLookAhead;
  static constexpr KvFormat kFormat = kCfg.shape.k_format;
  static constexpr int kDim = kCfg.shape.head_dim_qk;

  // How the waves share out the rows of a tile.
  template <bool kWide>
  struct Share {
    using Layout = std::conditional_t<kWide, WideRows<kCfg, kDim>, TileRows<kCfg, kFormat, kDim>>;
    static constexpr int kTileKeys = kWide ? wide_tile_keys(kCfg) : tile_keys(kCfg);
    static constexpr int kRows = kTileKeys / kCfg.tuning.producer_waves / kTeams;  // of a wave
    static_assert(kRows <= kWaveSize && kWaveSize % kRows == 0, "a lane cares for one row");
  };

 public:
  FLASHPORT_DEVICE StoredSegmentsProducer(const Params& p, const Block& block, const Line& line, Shared* teams)
      : block_(block),
        teams_(teams),
        ring_(teams[block.team()].ring),
        fits_cache_(fits_cache(p, line)),
        in_units_(p.heads_side_by_side) {}

  FLASHPORT_DEVICE void run(const Params& p, const Range& range) {
    LeafCursor ahead(range);
    LeafCursorAt<Segment&> scout(range, ring_.turns.scouts[block_.wave()]);
    if (ahead.done()) return;
#pragma unroll 1
    for (int i = 0; i < kLookAhead; ++i) {
      look_up(p, scout, i);
      if (i == 0) walk_ = scouts_walk_;
    }
    await_copies();
    __syncwarp();
    for (int slot = 0; !ahead.done(); slot = slot + 1 == kLookAhead ? 0 : slot + 1) {
      const Segment& s = ahead.segment;
      const TurnKeys turn = walk_.turn(p, s.seq, ahead.leaf);
      const PagedCache& cache = walk_.cache(p);
      await_free();
      if (block_.team() == 0 && block_.thread() == 0) {
        ring_.turns.of[place_.stage] = turn;
        __threadfence_block();
      }
      Rows rows[kTurnTiles];
#pragma unroll
      for (int tile = 0; tile < kTurnTiles; ++tile) {
        rows[tile] = turn.is_wide ? rows_of_tile<true>(cache, s.seq, turn, slot, tile)
                                  : rows_of_tile<false>(cache, s.seq, turn, slot, tile);
      }
      __syncwarp();  // more than one lane has read each page number
      look_up(p, scout, slot);
      if (turn.is_wide) {
        bring<true>(p, ahead, cache, rows);
      } else {
        bring<false>(p, ahead, cache, rows);
      }
      ahead.next(p, kCfg.tuning.leaves);
    }
    await_copies();
  }

 private:
  // The wave's rows of a tile.
  struct Rows {
    kv::TokenCoord place;  // of the lane's row
    int count;             // the first ones, which are there
    bool neighbours;       // they follow each other, so that their addresses need no list
  };

  FLASHPORT_DEVICE static bool fits_cache(const Params& p, const Line& line) {
    constexpr std::int64_t kTokenBytes = kv_row_bytes(kFormat, kDim) + kv_row_bytes(kFormat, kCfg.shape.head_dim_v);
    return std::int64_t{line.leaves} * (kLeafKeys * kTokenBytes) * p.num_kv_heads <= cached_bytes(kFormat);
  }

  template <bool kWide>
  FLASHPORT_DEVICE int first_row() const {
    return ((kSharing == Sharing::kRows ? block_.team() * kCfg.tuning.producer_waves : 0) + block_.wave()) *
           Share<kWide>::kRows;
  }
  // The lane's row of a tile.
  template <bool kWide>
  FLASHPORT_DEVICE int own_row() const {
    return first_row<kWide>() + block_.lane() % Share<kWide>::kRows;
  }
  // Where in its ring a wave leaves what it knows of its rows: as waves share out tiles of blocks, also for those of 16
  // bits, or one would write what another has yet to read.
  FLASHPORT_DEVICE int first_place() const { return block_.wave() * Share<false>::kRows; }
  template <bool kWide>
  FLASHPORT_DEVICE int own_place(int tile) const {
    constexpr int kSharers = kSharing == Sharing::kRows ? kTeams : 1;
    return tile * (tile_keys(kCfg) / kSharers) + first_place() + block_.lane() % Share<kWide>::kRows;
  }
  FLASHPORT_DEVICE int first_head(const Segment& s) const {
    return kHeads == 1 ? s.kv_head : s.kv_head - block_.team();
  }
  FLASHPORT_DEVICE KvRing<kCfg>& ring_of(int head) const { return kHeads == 1 ? ring_ : teams_[head].ring; }

  // Asks for the page numbers of the turn that `scout` stands at, and moves it on.
  FLASHPORT_DEVICE void look_up(const Params& p, LeafCursorAt<Segment&>& scout, int slot) {
    __syncwarp();  // all lanes have moved the scout
    if (scout.done()) return;
    const TurnKeys turn = scouts_walk_.turn(p, scout.segment.seq, scout.leaf);
    const std::int32_t* pages = scouts_walk_.pages();
    const auto ask = [&](auto wide) FLASHPORT_INLINE {
      using Its = Share<wide()>;
#pragma unroll
      for (int tile = 0; tile < kTurnTiles; ++tile) {
        const int row = tile * Its::kTileKeys + own_row<wide()>();
        if (row >= turn.count || block_.lane() >= Its::kRows) continue;
        copy_async<4>(&ring_.pages[slot][own_place<wide()>(tile)],
                      pages + kv::page_coord<true>(scouts_walk_.cache(p), pages, turn.first + row).page, true);
      }
    };
    if (pages != nullptr) {
      if (turn.is_wide) {
        ask(std::true_type{});
      } else {
        ask(std::false_type{});
      }
    }
    scout.next(p, kCfg.tuning.leaves);
  }

  template <bool kWide>
  FLASHPORT_DEVICE Rows rows_of_tile(const PagedCache& cache, int seq, const TurnKeys& turn, int slot, int tile) const {
    using Its = Share<kWide>;
    const int first = tile * Its::kTileKeys + first_row<kWide>();
    Rows rows;
    rows.count = minimum(maximum(turn.count - first, 0), Its::kRows);
    rows.neighbours = (cache.table == nullptr || cache.page_size % Its::kRows == 0) &&
                      static_cast<std::uint64_t>(cache.k.token_stride | cache.v.token_stride) < 1 << 24;
    rows.place = {0, 0};
    if (rows.count > 0) {
      // In place of a row that is not there the one before the end: an address for copies that write zeros.
      const int behind = rows_behind<kWide>(rows), row = first + block_.lane() % Its::kRows - behind;
      const int offset = kv::page_coord<true>(cache, cache.table, turn.first + row).offset;
      rows.place = {cache.table == nullptr ? seq : ring_.pages[slot][own_place<kWide>(tile) - behind], offset};
    }
    return rows;
  }
  // How far the lane's row lies behind the last one that is there.
  template <bool kWide>
  FLASHPORT_DEVICE int rows_behind(const Rows& rows) const {
    return maximum(block_.lane() % Share<kWide>::kRows - maximum(rows.count - 1, 0), 0);
  }

  template <bool kWide>
  FLASHPORT_DEVICE void bring(const Params& p, const LeafCursor& ahead, const PagedCache& cache,
                              const Rows (&rows)[kTurnTiles]) {
    const Segment& s = ahead.segment;
#pragma unroll
    for (int tile = 0; tile < kTurnTiles; ++tile) {
      if (tile > 0) await_free();
      copy<kWide>(cache.k, s, rows[tile]);
      if (tile == 0 && ahead.at_segment_start()) bring_query(p, s);
      hand_over();
    }
#pragma unroll
    for (int tile = 0; tile < kTurnTiles; ++tile) {
      await_free();
      copy<kWide>(cache.v, s, rows[tile]);
      hand_over();
    }
  }

  FLASHPORT_DEVICE void bring_query(const Params& p, const Segment& s) {
    mbarrier_wait(&ring_.query_free[query_.stage], query_.phase ^ 1);
    copy_query<kCfg>(p, s, block_, ring_.queries[query_.stage]);
    query_.next();
  }

  // A tile is given back to each team's ring: a lane waits for one of them.
  FLASHPORT_DEVICE void await_free() const {
    mbarrier_wait(&ring_of(block_.lane() % kHeads).free[place_.stage], place_.phase ^ 1);
    if constexpr (kHeads > 1) __syncwarp();
  }
  FLASHPORT_DEVICE void hand_over() {
    mbarrier_arrive_on_copies(&ring_of(0).ready[place_.stage]);
    place_.next();
  }

  // Copies the wave's rows to the next place of the ring, which is free.
  template <bool kWide>
  FLASHPORT_DEVICE void copy(const CacheParams& cache, const Segment& s, const Rows& rows) {
    using Its = Share<kWide>;
    using Layout = typename Its::Layout;
    using Copies = RowCopies<Layout, Its::kRows, kHeads>;
    const int lane = block_.lane(), row = first_row<kWide>();
    char* tile = teams_[0].ring.tile(place_.stage);
    const char* own = static_cast<const char*>(cache.data) + kv::row_offset(cache, rows.place, first_head(s));
    // Where in the tile's rows what the wave brings begins.
    const int first_byte = kHeads == 1 ? Layout::head_offset(0, s.kv_head, false) : 0;
    const std::uint64_t policy = fits_cache_ ? kNormalPolicy : kReadOncePolicy;
    // Row i begins at row_at(i).
    const auto copy_whole = [&](const auto& row_at) FLASHPORT_INLINE {
      if constexpr (kHeads == 1 && !kWide) {  // one head of blocks begins inside a unit of 16 bytes
        if (in_units_) {
          RowCopies<Layout, Its::kRows, 1, true>::template copy_whole<PastEnd::kZeros>(
              lane, tile, row, 0, rows.count, [&](int i) { return row_at(i) - first_byte; }, policy);
          return;
        }
      }
      Copies::template copy_whole<PastEnd::kZeros>(lane, tile, row, first_byte, rows.count, row_at, policy);
    };
    if (rows.neighbours) {
      const auto stride = static_cast<int>(cache.token_stride);
      const char* first = own - (lane % Its::kRows - rows_behind<kWide>(rows)) * stride;
      copy_whole([&](int i) { return first + (i - row) * stride; });
      return;
    }
    const char** list = ring_.key_rows() + first_place() - row;
    __syncwarp();  // the rows of the tile before have been read
    if (lane < Its::kRows) list[row + lane] = own;
    __syncwarp();
    copy_whole([&](int i) { return list[i]; });
  }

  const Block& block_;
  Shared* teams_;
  KvRing<kCfg>& ring_;
  const bool fits_cache_;
  const bool in_units_;  // heads lie side by side: units that one begins in are all there
  SegmentWalk walk_, scouts_walk_;
  PipelineState<KvRing<kCfg>::kTiles> place_;
  PipelineState<KvRing<kCfg>::kQueries> query_;
};

}  // namespace flashport::FLASHPORT_TARGET::decode
