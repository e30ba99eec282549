// The waves of a block that do nothing but copy: what kv_pipeline.h's ring is filled by.
#pragma once

#include "cuda/decode/kv_pipeline.h"
#include "cuda/decode/row_copies.h"
#include FLASHPORT_DECODE_TUNING_HEADER

namespace flashport::FLASHPORT_TARGET::decode {

// Whether L2 may keep all keys and values from one launch to the next.
template <DecodeConfig kCfg>
FLASHPORT_DEVICE bool fits_cache(const DecodeParamsOf<kCfg>& p, const Line& line) {
  int token_bytes = p.num_kv_heads * (p.cache.k.row_bytes + p.cache.v.row_bytes);
  if constexpr (reads_factors(kCfg.shape))
    token_bytes += p.num_kv_heads * (p.k_factors.row_bytes + p.v_factors.row_bytes);
  return std::int64_t{line.leaves} * (kLeafKeys * token_bytes) <=
         minimum(cached_bytes(kCfg.shape.k_format), cached_bytes(kCfg.shape.v_format));
}

// Whether the teams of a block walk through the same tokens side by side, with heads that lie side by side in memory.
template <DecodeConfig kCfg>
FLASHPORT_DEVICE bool teams_share_rows(const DecodeParams& p, const Range& range) {
  constexpr unsigned kTeams = kCfg.tuning.teams;
  if (kTeams == 1 || !p.heads_side_by_side || p.num_chunks > 0 || p.row_tiles > 1 || p.teams_help) return false;
  return p.cuts[range.line.cut].concurrent.value % kTeams == 0;
}

// How the producers of a block's teams share the copies. A head of q8_0 begins and ends inside a sector, and its 136
// bytes are no whole units of 16; one of 64 dims in 16 bits has 128 bytes, and its next row lies far: so teams that
// walk through the same tokens bring the neighbouring heads of a row at once.
enum class Sharing {
  kNone,      // each team brings the head that it works on
  kRows,      // all share out the rows of a tile, and bring the heads of all teams
  kFirstTeam  // all share out the rows of a tile, of the head that the first team works on alone
};

// The producer waves' share of decode(): the same leaves in the same order. `block` has the producer waves of one team
// or, for kFirstTeam, of all.
template <DecodeConfig kCfg, Sharing kSharing, class Shared>
class KvProducer {
  using Params = DecodeParamsOf<kCfg>;
  static constexpr int kTeams = kCfg.tuning.teams;
  static constexpr bool kAppends = kCfg.shape.appends;
  static constexpr bool kFactorRows = factors_of(kCfg.shape) == Factors::kOfGroups;
  static constexpr int kTurnTiles = turn_tiles(kCfg);  // of keys, and of values
  static_assert(!kAppends || (kTeams == 1 && kTurnTiles == 1), "new rows are those of one head");
  static constexpr int kHeads = kSharing == Sharing::kRows ? kTeams : 1;  // that a copy of a row has
  static constexpr int kSharers = kSharing == Sharing::kNone ? 1 : kTeams;
  static constexpr int kRowsPerWave = tile_keys(kCfg) / kCfg.tuning.producer_waves / kSharers;  // of a tile
  static constexpr int kRowsAtOnce = kRowsPerWave < kWaveSize ? kRowsPerWave : kWaveSize;
  static constexpr int kRowsPerLane = kRowsPerWave / kRowsAtOnce;
  static constexpr int kLookAhead = KvRing<kCfg>::kLookAhead;
  // Where keys are appended the last row may be a new one, whose page is not read.
  static constexpr PastEnd kKeysPastEnd = kAppends ? PastEnd::kZeros : PastEnd::kLastRow;
  using Tiles = KvTiles<kCfg>;
  using KeyFormat = SideFormat<kCfg.shape.k_format>;
  using ValueFormat = SideFormat<kCfg.shape.v_format>;
  static constexpr bool kHasNeighbours = kHeads > 1 && kRowsPerLane == 1;
  // ptxas 13.0 makes illegal instructions of copies with a policy in the kernels of large panels (row_copies.h).
  static constexpr bool kHasPolicy = !uses_wgmma(kCfg.shape) || kCfg.shape.head_dim_v <= 128;

 public:
  FLASHPORT_DEVICE KvProducer(const Params& p, const Block& block, const Line& line, Shared* teams)
      : block_(block),
        fits_cache_(fits_cache<kCfg>(p, line)),
        teams_(teams),
        ring_(teams[block.team()].ring),
        as_stored_(Params::kPlain || are_as_stored(p)),
        in_units_(kSharing == Sharing::kFirstTeam && p.heads_side_by_side),
        neighbours_(kHasNeighbours && (p.cache.table == nullptr || p.cache.page_size % kRowsPerWave == 0) &&
                    token_strides(p) < 1 << 24) {}

  FLASHPORT_DEVICE void run(const Params& p, const Range& range) {
    if constexpr (requires { teams_->ahead; }) {
      auto& places = teams_[block_.team()].ahead[block_.wave()];
      const LeafCursorAt<Segment&> ahead(range, places[0]);
      if constexpr (sizeof(places) > sizeof(Segment)) {
        bring(p, ahead, LeafCursorAt<Segment&>(range, places[1]));
      } else {
        bring(p, ahead, LeafCursor(range));
      }
    } else {
      bring(p, LeafCursor(range), LeafCursor(range));
    }
  }

 private:
  // The wave's rows of a tile.
  struct Rows {
    kv::TokenCoord places[kRowsPerLane];  // of those that the lane cares for
    int count;                            // of those before the sequence's end
    bool whole;                           // they are as stored, and the first `count` are all there
    bool neighbours;                      // and they follow each other, so that their addresses need no list
  };

  FLASHPORT_DEVICE static std::uint64_t token_strides(const Params& p) {
    std::int64_t strides = p.cache.k.token_stride | p.cache.v.token_stride;
    if constexpr (kFactorRows) strides |= p.k_factors.token_stride | p.v_factors.token_stride;
    return static_cast<std::uint64_t>(strides);
  }

  // Kernels of blocks have code for each format.
  FLASHPORT_DEVICE static bool at_use(bool x) { return chooses_formats(kCfg.shape) ? at_each_use(x) : x; }

  FLASHPORT_DEVICE static bool are_as_stored(const DecodeParams& p) {
    return KeyFormat(p.k_format).with_rows([&](auto format) {
      return is_as_stored<typename Tiles::template KeysOf<format()>>(p.cache.k);
    }) && ValueFormat(p.v_format).with_rows([&](auto format) {
      return is_as_stored<typename Tiles::template ValuesOf<format()>>(p.cache.v);
    });
  }

  // `scout` goes before `ahead`.
  template <class Ahead, class Scout>
  FLASHPORT_DEVICE void bring(const Params& p, Ahead ahead, Scout scout) {
    if (ahead.done()) return;
#pragma unroll 1  // code that runs once is slow, and the first one's answer takes as long as the others
    for (int i = 0; i < kLookAhead; ++i) look_up(p, scout, i);
    await_copies();
    __syncwarp();
    for (int slot = 0; !ahead.done(); slot = slot + 1 == kLookAhead ? 0 : slot + 1) {
      const Segment& s = ahead.segment;
      if constexpr (kAppends) {
        if (ahead.at_segment_start()) new_keys_ = new_keys(p, s.seq);
      }
      await_free();
      Rows rows[kTurnTiles];
#pragma unroll
      for (int tile = 0; tile < kTurnTiles; ++tile) rows[tile] = rows_of_tile(p, ahead, slot, tile);
      __syncwarp();             // more than one lane may have read each page number
      look_up(p, scout, slot);  // before the copies, behind which it would wait
#pragma unroll
      for (int tile = 0; tile < kTurnTiles; ++tile) {
        if (tile > 0) await_free();
        if (!at_use(rows[tile].neighbours)) aim<true, kTurnTiles == 1>(p, rows[tile], first_head(s));
        if constexpr (kAppends) aim_at_new_keys(p, ahead);
        KeyFormat(p.k_format).with_rows([&](auto format) {
          copy<typename Tiles::template KeysOf<format()>, kKeysPastEnd>(p.cache.k, ring_.key_rows(), s.kv_head,
                                                                        rows[tile]);
        });
        if constexpr (kFactorRows) {
          copy<typename Tiles::FactorRows, kKeysPastEnd>(p.k_factors, ring_.key_factors(), s.kv_head, rows[tile],
                                                         Tiles::kFactorsByte);
        }
        if constexpr (factors_of(kCfg.shape) == Factors::kOfRows) copy_factors(p, rows[tile], first_head(s));
        // After the first keys, which are many more, and handed over with them.
        if (tile == 0 && ahead.at_segment_start()) bring_query(p, s);
        hand_over();
      }
#pragma unroll
      for (int tile = 0; tile < kTurnTiles; ++tile) {
        await_free();
        if (kTurnTiles > 1 && !at_use(rows[tile].neighbours)) aim<false, true>(p, rows[tile], first_head(s));
        ValueFormat(p.v_format).with_rows([&](auto format) {
          copy<typename Tiles::template ValuesOf<format()>, PastEnd::kZeros>(p.cache.v, ring_.value_rows(), s.kv_head,
                                                                             rows[tile]);
        });
        if constexpr (kFactorRows) {
          copy<typename Tiles::FactorRows, PastEnd::kZeros>(p.v_factors, ring_.value_factors(), s.kv_head, rows[tile],
                                                            Tiles::kFactorsByte);
        }
        hand_over();
      }
      ahead.next(p, kCfg.tuning.leaves);
    }
    await_copies();
  }

  FLASHPORT_DEVICE int first_row() const {
    return ((kSharing == Sharing::kRows ? block_.team() * kCfg.tuning.producer_waves : 0) + block_.wave()) *
           kRowsPerWave;
  }
  FLASHPORT_DEVICE int first_head(const Segment& s) const {
    return kHeads == 1 ? s.kv_head : s.kv_head - block_.team();
  }
  FLASHPORT_DEVICE KvRing<kCfg>& ring_of(int head) const { return kHeads == 1 ? ring_ : teams_[head].ring; }
  // Lane i cares for rows i and 32 + i of the wave's rows; of 16 rows the other lanes know them too.
  FLASHPORT_DEVICE int row_of_wave(int i) const { return i * kWaveSize + block_.lane() % kRowsAtOnce; }
  FLASHPORT_DEVICE int row_of_tile(int i) const { return first_row() + row_of_wave(i); }
  FLASHPORT_DEVICE int row_of_turn(int tile, int i) const { return tile * tile_keys(kCfg) + row_of_tile(i); }
  FLASHPORT_DEVICE static bool holds(const Segment& s, int token) { return token >= s.key_low && token < s.key_high; }

  // Asks for the page numbers of the leaf that `scout` stands at, if there are pages, and moves it on.
  template <class Cursor>
  FLASHPORT_DEVICE void look_up(const Params& p, Cursor& scout, int slot) {
    if (p.cache.table == nullptr || scout.done()) return;
    const Segment& s = scout.segment;
#pragma unroll
    for (int i = 0; i < kTurnTiles * kRowsPerLane; ++i) {
      const int row = row_of_turn(i / kRowsPerLane, i % kRowsPerLane), token = scout.key() + row;
      if (!holds(s, token) || block_.lane() >= kRowsAtOnce) continue;
      copy_async<4>(&ring_.pages[slot][row], s.pages + kv::page_coord<Params::kPlain>(p.cache, s.pages, token).page,
                    true);
    }
    scout.next(p, kCfg.tuning.leaves);
  }
  template <class Cursor>
  FLASHPORT_DEVICE Rows rows_of_tile(const Params& p, const Cursor& ahead, int slot, int tile) const {
    const Segment& s = ahead.segment;
    const int first = ahead.key() + tile * tile_keys(kCfg) + first_row();
    Rows rows;
    rows.count = minimum(maximum(s.key_high - first, 0), kRowsPerWave);
    rows.whole = Params::kPlain || (as_stored_ && first >= s.key_low);
    rows.neighbours = neighbours_ && rows.whole;
#pragma unroll
    for (int i = 0; i < kRowsPerLane; ++i) {
      // In place of a row that is not there the last one that is (PastEnd).
      const int row = row_of_turn(tile, i) - (rows.whole ? rows_behind(rows, i) : 0), token = ahead.key() + row;
      rows.places[i] = !holds(s, token)
                           ? kv::TokenCoord{0, rows.whole ? 0 : -1}
                           : kv::TokenCoord{s.pages == nullptr ? s.seq : ring_.pages[slot][row],
                                            kv::page_coord<Params::kPlain>(p.cache, s.pages, token).offset};
    }
    return rows;
  }
  // How far the lane's row lies behind the last one that is there.
  FLASHPORT_DEVICE int rows_behind(const Rows& rows, int i) const {
    return maximum(row_of_wave(i) - maximum(rows.count - 1, 0), 0);
  }

  FLASHPORT_DEVICE void bring_query(const Params& p, const Segment& s) {
    mbarrier_wait(&ring_.query_free[query_.stage], query_.phase ^ 1);
    copy_query<kCfg>(p, s, block_, ring_.queries[query_.stage]);
    if constexpr (kAppends) {
      stage_new_keys(p, s, new_keys_, block_, teams_[block_.team()].new_keys[query_.stage]);
    }
    query_.next();
  }

  // What lies in a tile of all teams' heads is given back to each team's ring: a lane waits for one of them.
  FLASHPORT_DEVICE void await_free() const {
    mbarrier_wait(&ring_of(block_.lane() % kHeads).free[place_.stage], place_.phase ^ 1);
    if constexpr (kHeads > 1) __syncwarp();
  }

  // Leaves behind where the wave's rows of a tile lie, of keys, of values or of both.
  template <bool kKeys, bool kValues>
  FLASHPORT_DEVICE void aim(const Params& p, const Rows& rows, int head) {
    const auto address = [&](const CacheParams& cache, kv::TokenCoord place) -> const char* {
      const std::int64_t offset = kv::row_offset(cache, place, head);
      return offset < 0 ? nullptr : static_cast<const char*>(cache.data) + offset;
    };
    __syncwarp();  // the rows of the tile before have been read
#pragma unroll
    for (int i = 0; i < kRowsPerLane; ++i) {
      if (block_.lane() >= kRowsAtOnce) continue;
      if constexpr (kKeys) ring_.key_rows()[row_of_tile(i)] = address(p.cache.k, rows.places[i]);
      if constexpr (kValues) ring_.value_rows()[row_of_tile(i)] = address(p.cache.v, rows.places[i]);
      if constexpr (kFactorRows && kKeys) ring_.key_factors()[row_of_tile(i)] = address(p.k_factors, rows.places[i]);
      if constexpr (kFactorRows && kValues)
        ring_.value_factors()[row_of_tile(i)] = address(p.v_factors, rows.places[i]);
    }
    __syncwarp();
  }

  // New keys and values lie elsewhere.
  FLASHPORT_DEVICE void aim_at_new_keys(const Params& p, const LeafCursor& ahead) {
    if (ahead.key() + turn_keys(kCfg) <= new_keys_.before) return;
#pragma unroll
    for (int i = 0; i < kRowsPerLane; ++i) {
      const int index = ahead.key() + row_of_tile(i) - new_keys_.before;
      if (index < 0 || index >= new_keys_.count || block_.lane() >= kRowsAtOnce) continue;
      ring_.key_rows()[row_of_tile(i)] = new_row(p.append.sides[1].rows, ahead.segment, new_keys_, index);
      ring_.value_rows()[row_of_tile(i)] = new_row(p.append.sides[2].rows, ahead.segment, new_keys_, index);
    }
    __syncwarp();
  }

  // Copies the wave's rows to the next place of the ring, which is free, from its byte `from_byte` on. `list`: where
  // they lie, unless they are neighbours.
  template <class Layout, PastEnd kPastEnd>
  FLASHPORT_DEVICE void copy(const CacheParams& cache, const char* const* list, int head, const Rows& rows,
                             int from_byte = 0) {
    using Copies = RowCopies<Layout, kRowsAtOnce, kHeads>;
    // Where in the tile's rows what the wave brings begins.
    const int first_byte = kHeads == 1 ? Layout::head_offset(block_.team(), head, false) : 0;
    char* tile = teams_[0].ring.tile(place_.stage) + from_byte;
    const bool whole = Params::kPlain || at_use(rows.whole);
    if (at_use(rows.neighbours)) {
      const auto stride = static_cast<int>(cache.token_stride);
      const char* first = static_cast<const char*>(cache.data) +
                          kv::row_offset(cache, rows.places[0], head - block_.team()) -
                          (row_of_wave(0) - rows_behind(rows, 0)) * stride;
      Copies::template copy_whole<PastEnd::kZeros>(
          block_.lane(), tile, first_row(), first_byte, rows.count,
          [&](int row) { return first + (row - first_row()) * stride; }, fits_cache_ ? kNormalPolicy : kReadOncePolicy);
      return;
    }
    [[maybe_unused]] constexpr bool kIsRolled = kSharing == Sharing::kNone && kTeams > 1;  // for shorter code
#pragma unroll(kIsRolled ? 1 : kRowsPerLane)
    for (int i = 0; i < kRowsPerLane; ++i) {
      const int row = first_row() + i * kWaveSize;
      const auto copy_whole = [&](auto policy) {
        Copies::template copy_whole<kPastEnd>(
            block_.lane(), tile, row, first_byte, rows.count - i * kWaveSize, [&](int at) { return list[at]; }, policy);
      };
      if constexpr (kSharing == Sharing::kFirstTeam) {
        if (whole && in_units_) {
          const int before = first_byte - block_.team() * Layout::kColumn;  // of the head, in its first unit
          RowCopies<Layout, kRowsAtOnce, 1, true>::template copy_whole<kPastEnd>(
              block_.lane(), tile, row, first_byte - before, rows.count - i * kWaveSize,
              [&](int at) { return list[at] - before; }, kNormalPolicy);
          continue;
        }
      }
      if (!whole) {
        Copies::copy_part(block_.lane(), tile, row, first_byte, cache, list);
      } else if constexpr (!kHasPolicy) {
        copy_whole(NoPolicy{});
      } else {
        copy_whole(kSharing == Sharing::kFirstTeam || fits_cache_ ? kNormalPolicy : kReadOncePolicy);
      }
    }
  }
  // Copies the factors of the wave's rows, of keys and of values: a lane has a row, and where rows are fewer some of
  // the heads. For fp16 it copies the word that holds the factor, up to the factor's end.
  FLASHPORT_DEVICE void copy_factors(const Params& p, const Rows& rows, int head) {
    constexpr int kLanesOfRow = kWaveSize / kRowsAtOnce;
#pragma unroll
    for (int i = 0; i < kRowsPerLane; ++i) {
#pragma unroll
      for (int of = 0; of < kHeads; of += kLanesOfRow) {
        const int its = of + block_.lane() / kRowsAtOnce;
        if (its >= kHeads) continue;
        auto* to =
            reinterpret_cast<typename Tiles::FactorOfRow*>(ring_of(its).tile(place_.stage) + Tiles::kFactorsByte);
        for (const bool is_key : {true, false}) {
          const CacheParams& factors = is_key ? p.k_factors : p.v_factors;
          if (factors.data == nullptr) continue;
          const std::int64_t offset = kv::row_offset(factors, rows.places[i], head + its);
          const auto address = reinterpret_cast<std::uintptr_t>(factors.data) + (offset < 0 ? 0 : offset);
          const int into_word = static_cast<int>(address & 3);
          copy_async_first<4>(to + (is_key ? 0 : tile_keys(kCfg)) + row_of_tile(i),
                              reinterpret_cast<const void*>(address - into_word),
                              offset >= 0 && row_of_wave(i) < rows.count ? into_word + factors.row_bytes : 0);
        }
      }
    }
  }
  // A tile of all teams' heads is told of at the first team's barrier.
  FLASHPORT_DEVICE void hand_over() {
    for (int i = 0; i < kTeams / kSharers; ++i) mbarrier_arrive_on_copies(&ring_of(0).ready[place_.stage]);
    place_.next();
  }

  const Block& block_;
  const bool fits_cache_;
  Shared* teams_;
  KvRing<kCfg>& ring_;
  PipelineState<KvRing<kCfg>::kTiles> place_;
  PipelineState<KvRing<kCfg>::kQueries> query_;
  const bool as_stored_;
  const bool in_units_;                  // heads lie side by side: units that one begins in are all there
  const bool neighbours_;                // rows of a wave follow each other, as they are of one page
  [[maybe_unused]] NewKeys new_keys_{};  // of the sequence, in kernels that append
};

}  // namespace flashport::FLASHPORT_TARGET::decode
