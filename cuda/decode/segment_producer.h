// The waves of a block that bring rows of any formats (common/device/decode/segments.h) into the ring of kv_pipeline.h,
// widened to the math type and multiplied by their factors: the waves that compute see a 16-bit cache.
//
// Each producer wave has the same 16 rows of every tile. Their bytes come as they are stored, with their factors, by
// cp.async into memory of the wave's own, as many tiles ahead as there is room for; when a tile's turn comes, the wave
// widens its rows into the tile, a block of 32 values a lane.
#pragma once

#include "cuda/decode/kv_pipeline.h"
#include "cuda/decode/stored_rows.h"

namespace flashport::FLASHPORT_TARGET::decode {

template <DecodeConfig kCfg>
struct SegmentStages {};
template <DecodeConfig kCfg>
  requires(reads_segments(kCfg.shape))
struct SegmentStages<kCfg> {
  StoredRows<kCfg> stored[kCfg.tuning.producer_waves];
};

template <DecodeConfig kCfg, class Shared>
class SegmentProducer {
  using Rows = StoredRows<kCfg>;
  using Ring = KvRing<kCfg>;
  using Layout = typename KvTiles<kCfg>::Keys;
  static_assert(kCfg.shape.head_dim_qk == kCfg.shape.head_dim_v, "tiles of keys and of values are alike");
  static constexpr int kRows = Rows::kRows;
  static_assert(2 * kRows == kWaveSize, "lanes look up the rows of keys and those of values side by side");
  static constexpr int kBlockValues = 32;                                    // that a lane widens
  static constexpr int kRowsAtOnce = 2;                                      // of a lane
  static constexpr int kPasses = kCfg.shape.head_dim_qk / kBlockValues / 4;  // of four blocks of eight rows

 public:
  FLASHPORT_DEVICE SegmentProducer(const Block& block, Shared& shared)
      : block_(block),
        ring_(shared.ring),
        stored_(shared.stored[block.wave()]),
        lane_(block.lane()),
        first_row_(block.wave() * kRows) {}

  FLASHPORT_DEVICE void run(const MixedDecodeParams& p, const Range& range) {
    LeafCursor now(range), ahead(range);
    if (now.done()) return;
    look_up(p, ahead);
    bool is_key = true;
#pragma unroll 1
    while (!now.done()) {
#pragma unroll 1
      while (!ahead.done() && stored_.has_number() && ask(p, ahead)) {
      }
      if (is_key && now.at_segment_start()) bring_query(p, now.segment);
      stored_.await_oldest();
      widen_tile(p, is_key);
      if (!is_key) now.next(p, kCfg.tuning.leaves);
      is_key = !is_key;
    }
  }

 private:
  FLASHPORT_DEVICE void bring_query(const MixedDecodeParams& p, const Segment& s) {
    mbarrier_wait(&ring_.query_free[query_.stage], query_.phase ^ 1);
    copy_query<kCfg>(p, s, block_, ring_.queries[query_.stage]);
    query_.next();
    await_copies();
  }

  // Lanes i and 16 + i look up row i of the next turn's tiles, of keys and of values.
  FLASHPORT_DEVICE void look_up(const MixedDecodeParams& p, const LeafCursor& ahead) {
    if (ahead.done()) return;
    const Segment& s = ahead.segment;
    if (s.seq != seq_) {
      seq_ = s.seq;
      starts_ = segment_starts(p, seq_);
    }
    const int key = ahead.key() + first_row_ + lane_ % kRows;
    segment_ = -1;
    if (key < s.key_low || key >= s.key_high) return;
    const SegmentKey at = segment_key(starts_, key);
    segment_ = at.segment;
    place_ = segment_coord(p.segments[segment_], seq_, at.key);
  }

  // Asks for the rows of the next tile, of keys and values in turn; false if there is no room for them yet.
  FLASHPORT_DEVICE bool ask(const MixedDecodeParams& p, LeafCursor& ahead) {
    if (!is_found_) {
      stored_.find(p, segment_, place_, ahead.segment.kv_head, lane_);
      is_found_ = true;
    }
    if (!stored_.ask(p, asks_values_, lane_)) return false;
    if (asks_values_) {
      ahead.next(p, kCfg.tuning.leaves);
      look_up(p, ahead);
      is_found_ = false;
    }
    asks_values_ = !asks_values_;
    return true;
  }

  // Widens the wave's rows of the oldest tile into the ring.
  FLASHPORT_DEVICE void widen_tile(const MixedDecodeParams& p, bool is_key) {
    __syncwarp();  // the copies of all lanes
    const int dims = is_key ? p.head_dim_qk : p.head_dim_v;
    const int segment = lane_ < kRows ? stored_.segment_of(lane_) : kNoRow;
    mbarrier_wait(&ring_.free[place_of_tile_.stage], place_of_tile_.phase ^ 1);
    char* tile = ring_.tiles[place_of_tile_.stage];
#pragma unroll 1
    for (int row = 0; row < kRows;) {  // runs of rows of one segment
      const int its = __shfl_sync(~0u, segment, row);
      const unsigned others = __ballot_sync(~0u, segment != its) & (~0u << row);
      const int end = others == 0 ? kRows : __ffs(static_cast<int>(others)) - 1;
      if (its < 0) {
        clear_rows(tile, row, end);
      } else {
        const CacheSegment& s = p.segments[its];
        const KeyScales& scales = is_key ? s.k_scale : s.v_scale;
        kv::with_format(is_key ? s.k_format : s.v_format, [&](auto constant) FLASHPORT_INLINE {
          constexpr KvFormat kFormat = constant;
          if (scales.data == nullptr) {
            widen_rows<kFormat, false>(tile, row, end, dims, scales);
          } else {
            widen_rows<kFormat, true>(tile, row, end, dims, scales);
          }
        });
      }
      row = end;
    }
    mbarrier_arrive_wave(&ring_.ready[place_of_tile_.stage]);
    place_of_tile_.next();
    stored_.drop_oldest();
  }

  // Rows [begin, end), eight at once: neighbouring lanes have neighbouring rows, whose units of 16 bytes lie in banks
  // of their own. Values that rows do not have are zeros.
  template <KvFormat kFormat, bool kHasScale>
  FLASHPORT_DEVICE void widen_rows(char* tile, int begin, int end, int dims, const KeyScales& scales) {
    // Two rows of a lane hide each other's latency, but their code takes long to compile.
    constexpr int kRowsAtOnce = kHasScale ? 1 : 2;
#pragma unroll 1
    for (int row = begin + lane_ % 8; row < end; row += 8 * kRowsAtOnce) {
#pragma unroll 1
      for (int pass = 0; pass < kPasses; ++pass) {
        const int dim = kBlockValues * (lane_ / 8 + 4 * pass);
        Words2 x[kRowsAtOnce][kBlockValues / 4];
#pragma unroll
        for (int r = 0; r < kRowsAtOnce; ++r) {
          const int its = minimum(row + 8 * r, end - 1);
          const auto stored = stored_.template block<kFormat>(its, dim);
          float scale = 1.0f;
#pragma unroll
          for (int i = 0; i < kBlockValues / 4; ++i) {
            if (kHasScale && i % 2 == 0) scale = stored_.factor(its, scales, minimum(dim + 4 * i, dims - 1));
            x[r][i] = kv::load_four<kMath, kFormat, kHasScale>(stored, 4 * i, scale);
          }
        }
#pragma unroll
        for (int r = 0; r < kRowsAtOnce; ++r) {
          if (row + 8 * r >= end) continue;
#pragma unroll
          for (int i = 0; i < kBlockValues / 8; ++i) {
            uint4 eight = make_uint4(x[r][2 * i].x, x[r][2 * i].y, x[r][2 * i + 1].x, x[r][2 * i + 1].y);
            if (kBlockValues * 4 * kPasses > dims && dim + 8 * i >= dims) eight = make_uint4(0, 0, 0, 0);
            *unit_of(tile, row + 8 * r, dim + 8 * i) = eight;
          }
        }
      }
    }
  }
  FLASHPORT_DEVICE void clear_rows(char* tile, int begin, int end) {
#pragma unroll 1
    for (int row = begin + lane_ % 8; row < end; row += 8) {
      for (int dim = 8 * (lane_ / 8); dim < kCfg.shape.head_dim_qk; dim += 32) {
        *unit_of(tile, row, dim) = make_uint4(0, 0, 0, 0);
      }
    }
  }
  FLASHPORT_DEVICE uint4* unit_of(char* tile, int row, int dim) {
    return reinterpret_cast<uint4*>(tile + Layout::offset(first_row_ + row, 2 * dim));
  }

  static constexpr MathType kMath = kCfg.shape.math;
  static constexpr int kNoRow = -2;

  const Block& block_;
  Ring& ring_;
  typename Rows::Wave stored_;
  const int lane_, first_row_;
  bool asks_values_ = false, is_found_ = false;
  int seq_ = -1, segment_ = -1;  // of the row that the lane has looked up
  SegmentStarts starts_;
  kv::TokenCoord place_{};
  PipelineState<Ring::kTiles> place_of_tile_;
  PipelineState<Ring::kQueries> query_;
};

}  // namespace flashport::FLASHPORT_TARGET::decode
