// The keys and values of each turn on their way through shared memory: a ring of tiles, K, V, K, V, in the order of
// their use, or K, K, V, V where a tile has half of a turn's. Producer waves (kv_producer.h) do nothing but copy; a
// full memory system holds up whoever issues copies, and would hold up the products. A tile is ready when its
// mbarrier's phase completes, every producer thread arriving behind its copies; it is free again when every compute
// wave has arrived at the other one. With teams a tile lies in the rings of all of them, a part of its rows in each
// (row_layout.h).
//
// Rows lie in a tile as row_layout.h says. Those outside the sequence and dims beyond the stored ones are zero. Copies
// are cp.async of 16 bytes, or of 8 or 4 where alignment asks for it (q8_0 with its block of 34 bytes, odd strides);
// 2-byte alignment goes through registers.
#pragma once

#include <algorithm>
#include <type_traits>

#include "common/device/decode/combine.h"
#include "common/device/decode/config.h"
#include "cuda/arch/mma.h"
#include "cuda/decode/block_shape.h"
#include "cuda/decode/query.h"
#include "cuda/decode/row_layout.h"

namespace flashport::FLASHPORT_TARGET::decode {

// Producer waves of kernels that read segments (segment_producer.h): those that copy, and then as many that widen keys
// as widen values.
inline constexpr int kSegmentCopiers = 4;
constexpr int side_wideners(const DecodeConfig& cfg) { return (cfg.tuning.producer_waves - kSegmentCopiers) / 2; }

template <DecodeConfig kCfg>
struct DecodeShared;  // of a team; those of a block's teams lie side by side

// Rows of a tile, from the beginning of the first team's on.
template <DecodeConfig kCfg, KvFormat kFormat, int kDim>
using TileLayout = std::conditional_t<uses_wgmma(kCfg.shape), PanelLayout<kDim, tile_keys(kCfg)>,
                                      RowLayout<kFormat, kDim, kCfg.tuning.teams, tile_keys(kCfg)>>;
template <DecodeConfig kCfg, class Base>
struct RowsInRings : Base {
  static constexpr int row_offset(int row) { return Base::row_offset(row, sizeof(DecodeShared<kCfg>)); }
  static constexpr int offset(int row, int byte) { return row_offset(row) + (Base::column(byte) ^ Base::swizzle(row)); }
};
template <DecodeConfig kCfg, KvFormat kFormat, int kDim>
using TileRows = RowsInRings<kCfg, TileLayout<kCfg, kFormat, kDim>>;
// The same where a segment of 16 bits lies beside those of blocks.
template <DecodeConfig kCfg, int kDim>
using WideRows = RowsInRings<kCfg, RowLayout<KvFormat::kFp16, kDim, kCfg.tuning.teams, wide_tile_keys(kCfg)>>;

// Where wgmma reads, panels begin at multiples of 1024 bytes.
template <DecodeConfig kCfg>
inline constexpr int kTileAlignment = uses_wgmma(kCfg.shape) ? 1024 : 128;

template <DecodeConfig kCfg>
struct KvTiles {
  static constexpr KvFormat kKeyFormat = product_format(kCfg.shape, kCfg.shape.k_format);
  static constexpr KvFormat kValueFormat = reads_segments(kCfg.shape) ? kKeyFormat : kCfg.shape.v_format;
  using Keys = TileRows<kCfg, kKeyFormat, kCfg.shape.head_dim_qk>;
  using Values = TileRows<kCfg, kValueFormat, kCfg.shape.head_dim_v>;
  // As the call's format has them (side_format.h), in tiles with room for the longest rows.
  template <KvFormat kFormat>
  using KeysOf = TileRows<kCfg, kKeyFormat == KvFormat::kBlocks ? kFormat : kKeyFormat, kCfg.shape.head_dim_qk>;
  template <KvFormat kFormat>
  using ValuesOf = TileRows<kCfg, kValueFormat == KvFormat::kBlocks ? kFormat : kValueFormat, kCfg.shape.head_dim_v>;
  // Bytes of a place in each team's ring: alike for keys and values, but where one is of 16 bits and the other of
  // blocks.
  static constexpr int kWideBytes =
      !kCfg.shape.has_wide_segments ? 0 : WideRows<kCfg, kCfg.shape.head_dim_qk>::kTileBytes;
  static constexpr int kMost = std::max({Keys::kTileBytes, Values::kTileBytes, kWideBytes});
  static constexpr bool kAlike = !chooses_formats(kCfg.shape) || kKeyFormat == kValueFormat;
  // Behind the codes of a tile its factors: those of groups as rows (factor_operand.h); of whole rows one of each key
  // and then of each value, in the ring of the head's team. Those of values are read with the scores, before the place
  // is given back.
  using FactorRows = TileRows<kCfg, KvFormat::kFp16, kCfg.shape.head_dim_qk / kFactoredValues>;
  using FactorOfRow = std::uint32_t;  // of fp32, or two of fp16
  static constexpr int kFactorsByte = kMost;
  static constexpr int kFactorBytes = [] {
    if constexpr (factors_of(kCfg.shape) == Factors::kOfGroups) {
      static_assert(kCfg.shape.head_dim_qk == kCfg.shape.head_dim_v && Keys::kTileBytes == kMost && kMost % 128 == 0);
      return (FactorRows::kTileBytes + 127) / 128 * 128;
    } else {
      return factors_of(kCfg.shape) == Factors::kOfRows ? 2 * tile_keys(kCfg) * static_cast<int>(sizeof(FactorOfRow))
                                                        : 0;
    }
  }();
  static constexpr int kKeyBytes = kAlike ? kMost + kFactorBytes : Keys::kTileBytes;
  static constexpr int kValueBytes = kAlike ? kMost + kFactorBytes : Values::kTileBytes;
  static_assert(kAlike || turn_tiles(kCfg) == 1, "keys and values take turns");
  static_assert(
      kCfg.tuning.teams == 1 || (Keys::kPitch == Values::kPitch && !chooses_formats(kCfg.shape)) ||
          kCfg.tuning.stages % (2 * turn_tiles(kCfg)) == 0,
      "a place of the ring has columns of all teams, which may be at different tiles: rows are alike in all, or "
      "a place is one of keys or of values for good");
};

// What producers tell of turns, and where their waves keep the segment that they look up pages of.
template <int kPlaces, int kWaves>
struct StoredTurns {
  TurnKeys of[kPlaces];
  Segment scouts[kWaves];
};
struct NoTurns {};

template <DecodeConfig kCfg>
struct KvRing {
  static constexpr int kTiles = kCfg.tuning.stages;
  // The next one early, if there is room for it.
  static constexpr int kQueries =
      sizeof(QueryTile<kCfg>) > 8 * 1024 || kCfg.tuning.teams == 4 || !KvTiles<kCfg>::kAlike ? 1 : 2;
  // Page numbers are brought so many turns early. Those of a turn have landed when its keys' first place is free: the
  // tile that was there before it was asked for after them.
  static constexpr int kTurnPlaces = 2 * turn_tiles(kCfg);
  static constexpr int kLookAhead = (kTiles + kTurnPlaces - 1) / kTurnPlaces;
  // The team's part of each tile.
  alignas(kTileAlignment<kCfg>) char tiles[(kTiles + 1) / 2 * KvTiles<kCfg>::kKeyBytes +
                                           kTiles / 2 * KvTiles<kCfg>::kValueBytes];
  FLASHPORT_DEVICE char* tile(int place) {
    using Tiles = KvTiles<kCfg>;
    if constexpr (Tiles::kAlike) return tiles + place * Tiles::kKeyBytes;
    return tiles + place / 2 * (Tiles::kKeyBytes + Tiles::kValueBytes) + place % 2 * Tiles::kKeyBytes;
  }
  QueryTile<kCfg> queries[kQueries];
  alignas(8) std::uint64_t ready[kTiles];  // of a tile, and of the query tiles that were asked for before it
  std::uint64_t free[kTiles];
  std::uint64_t query_free[kQueries];
  // The turns whose first tiles lie there, in the ring of the first team; written before these are handed over.
  static constexpr int kScouts =
      kCfg.tuning.producer_waves * (teams_may_help(kCfg.shape, kCfg.tuning.teams) ? kCfg.tuning.teams : 1);
  [[no_unique_address]] std::conditional_t<kCfg.shape.has_wide_segments, StoredTurns<kTiles, kScouts>, NoTurns> turns;
  // segment_copier.h has its own; where teams always share out the rows of segments, one looks up its part.
  static constexpr int kLookedUp = reads_segments(kCfg.shape) ? 1
                                   : kCfg.shape.has_wide_segments && !teams_may_help(kCfg.shape, kCfg.tuning.teams)
                                       ? turn_keys(kCfg) / kCfg.tuning.teams
                                       : turn_keys(kCfg);
  int pages[kLookAhead][kLookedUp];
  // Where the rows of the tile of keys lie that is being copied, and those of its values; they take turns where a turn
  // has more tiles. Then the same of their factors.
  static constexpr int kSides = turn_tiles(kCfg) == 1 ? 2 : 1;
  static constexpr bool kHasFactorRows = factors_of(kCfg.shape) == Factors::kOfGroups;
  const char* rows[kHasFactorRows ? 2 * kSides : kSides][kLookedUp / turn_tiles(kCfg)];
  FLASHPORT_DEVICE const char** key_rows() { return rows[0]; }
  FLASHPORT_DEVICE const char** value_rows() { return rows[kSides - 1]; }
  FLASHPORT_DEVICE const char** key_factors() { return rows[kSides]; }
  FLASHPORT_DEVICE const char** value_factors() { return rows[2 * kSides - 1]; }

  // `thread`: of the team. Producers of all teams arrive at `ready` of the first, or its own at that of a team once for
  // each of them; waves that widen arrive as one.
  FLASHPORT_DEVICE void init(unsigned thread) {
    const unsigned i = thread;
    constexpr int kProducers = kCfg.tuning.teams * kCfg.tuning.producer_waves;
    if (i < kTiles) mbarrier_init(&ready[i], reads_segments(kCfg.shape) ? side_wideners(kCfg) : kProducers * kWaveSize);
    if (i < kTiles) mbarrier_init(&free[i], kCfg.tuning.waves);
    if (i < kQueries) mbarrier_init(&query_free[i], kCfg.tuning.waves);
  }
};

// Barriers of a team: of its compute waves, of its producers, and of both.
enum TeamBarrier { kComputeBarrier, kProducerBarrier, kRangeBarrier, kTeamBarriers };
inline constexpr int kFirstTeamBarrier = 1;  // barrier 0 is __syncthreads()

// The tiles of the keys of a turn, or of its values, one after the other: all but the last are given back as soon as
// they have been read.
template <class Pipeline>
struct TurnTiles {
  Pipeline& pipeline;
};
FLASHPORT_DEVICE const char* current_tile(const char* tile) { return tile; }
template <class Pipeline>
FLASHPORT_DEVICE const char* current_tile(const TurnTiles<Pipeline>& tiles) {
  return tiles.pipeline.tile();
}
FLASHPORT_DEVICE void go_to_next_tile(const char*) {}
template <class Pipeline>
FLASHPORT_DEVICE void go_to_next_tile(const TurnTiles<Pipeline>& tiles) {
  tiles.pipeline.next_tile();
}

// What a compute wave sees of the ring.
template <DecodeConfig kCfg>
class KvPipeline {
 public:
  template <class Shared>
  FLASHPORT_DEVICE KvPipeline(const DecodeParams&, const Block& block, Shared& shared, LeafCursor&)
      : block_(block), ring_(shared.ring), first_ring_((&shared - block.team())->ring) {
    if constexpr (kCfg.tuning.teams > 1) ready_ = shared.heads_together ? first_ring_.ready : ring_.ready;
  }

  // Waits for the oldest turn's keys, or for their first tile where there are more.
  FLASHPORT_DEVICE auto keys() {
    await();
    return oldest();
  }
  FLASHPORT_DEVICE void refill_behind_keys(const DecodeParams&, LeafCursor&) const {}
  FLASHPORT_DEVICE void refill_behind_scores(const DecodeParams&, LeafCursor&) { release(); }
  // The barrier of a turn: what the waves have left for each other in shared memory is there, too. Those of a warpgroup
  // leave nothing.
  FLASHPORT_DEVICE void await_values(const DecodeParams&, LeafCursor&) const {
    await();
    if constexpr (!uses_wgmma(kCfg.shape)) block_.sync();
  }
  FLASHPORT_DEVICE auto values() { return oldest(); }
  FLASHPORT_DEVICE void refill_behind_values(const DecodeParams&, LeafCursor&) { release(); }

  // What the oldest turn has, where the producers say so.
  FLASHPORT_DEVICE const TurnKeys& turn() const { return first_ring_.turns.of[place_.stage]; }
  FLASHPORT_DEVICE const char* tile() const { return first_ring_.tile(place_.stage); }
  // Gives the oldest tile back, and waits for the one behind it.
  FLASHPORT_DEVICE void next_tile() {
    release();
    await();
  }

 private:
  FLASHPORT_DEVICE auto oldest() {
    if constexpr (turn_tiles(kCfg) == 1) {
      return tile();
    } else {
      return TurnTiles<KvPipeline>{*this};
    }
  }
  FLASHPORT_DEVICE void await() const {
    std::uint64_t* ready = ring_.ready;
    if constexpr (kCfg.tuning.teams > 1) ready = ready_;
    mbarrier_wait(&ready[place_.stage], place_.phase);
  }
  FLASHPORT_DEVICE void release() {
    mbarrier_arrive_wave(&ring_.free[place_.stage]);
    place_.next();
  }

  const Block& block_;
  KvRing<kCfg>& ring_;
  KvRing<kCfg>& first_ring_;
  std::uint64_t* ready_ = nullptr;  // of teams: the first one's, where a tile has the heads of all
  PipelineState<KvRing<kCfg>::kTiles> place_;
};

}  // namespace flashport::FLASHPORT_TARGET::decode
