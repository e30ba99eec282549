// The waves of a block that bring rows of any formats (common/device/decode/segments.h) into the ring of kv_pipeline.h,
// widened to the math type and multiplied by their factors: the waves that compute see a 16-bit cache.
//
// Some waves copy rows as they are stored (segment_copier.h) into a ring of slots (stored_ring.h), as many tiles ahead
// as there is room for; those that need no widening straight to their place. The others take turns: half of them widen
// the tiles of keys, half those of values, each wave always the same 32 rows, a block of 32 values a lane at a time.
#pragma once

#include "cuda/decode/segment_copier.h"
#include "cuda/decode/widen_block.h"

namespace flashport::FLASHPORT_TARGET::decode {

template <DecodeConfig kCfg>
struct SegmentStages {};
template <DecodeConfig kCfg>
  requires(reads_segments(kCfg.shape))
struct SegmentStages<kCfg> {
  StoredRing<kCfg> stored;
};

template <DecodeConfig kCfg>
class SegmentWidener {
  using Stored = StoredRing<kCfg>;
  using Ring = KvRing<kCfg>;
  using Layout = typename KvTiles<kCfg>::Keys;
  static_assert(kCfg.shape.head_dim_qk == kCfg.shape.head_dim_v, "tiles of keys and of values are alike");
  static_assert(Ring::kTiles % 2 == 0, "a place of the ring has keys or has values");
  static constexpr MathType kMath = kCfg.shape.math;
  static constexpr int kBlockValues = 32;                                    // that a lane widens
  static constexpr int kPasses = kCfg.shape.head_dim_qk / kBlockValues / 4;  // of four blocks of eight rows

 public:
  // `block`: the waves that widen keys, or those that widen values.
  FLASHPORT_DEVICE SegmentWidener(const Block& block, Ring& ring, Stored& stored, const StoredLayout& layout)
      : block_(block),
        ring_(ring),
        stored_(stored),
        layout_(layout),
        lane_(block.lane()),
        first_row_(block.wave() * kWaveSize) {}

  FLASHPORT_DEVICE void run(const MixedDecodeParams& p, const Range& range, bool widens_keys) {
    if (!widens_keys) place_.next();
    for (LeafCursor now(range); !now.done(); now.next(p, kCfg.tuning.leaves)) {
      if (!widens_keys) pass_tile();
      if (widens_keys && now.at_segment_start()) bring_query(p, now.segment);
      widen_tile(p, widens_keys);
      if (widens_keys) pass_tile();
    }
  }

 private:
  FLASHPORT_DEVICE void bring_query(const MixedDecodeParams& p, const Segment& s) {
    mbarrier_wait(&ring_.query_free[query_.stage], query_.phase ^ 1);
    copy_query<kCfg>(p, s, block_, ring_.queries[query_.stage]);
    query_.next();
    await_copies();
  }

  // The slot of a tile that the other waves widen. All waves give back every slot, so no wave waits for a barrier that
  // has gone on by two phases. Places of the ring are those of keys or those of values for good.
  FLASHPORT_DEVICE void pass_tile() {
    mbarrier_wait(&stored_.ready[slot_.slot], slot_.phase);
    give_back_slot();
  }
  FLASHPORT_DEVICE void give_back_slot() {
    mbarrier_arrive_wave(&stored_.free[slot_.slot]);
    slot_.next(layout_.slots);
  }

  // Widens the wave's rows of the next tile.
  FLASHPORT_DEVICE void widen_tile(const MixedDecodeParams& p, bool is_key) {
    mbarrier_wait(&stored_.ready[slot_.slot], slot_.phase);
    const StoredRows<kCfg> rows(stored_, layout_, slot_.slot);
    char* tile = ring_.tile(place_.stage);
    const int dims = is_key ? p.head_dim_qk : p.head_dim_v;
    const int segment = rows.segment_of(first_row_ + lane_);
    mbarrier_wait(&ring_.free[place_.stage], place_.phase ^ 1);
#pragma unroll 1
    for (int row = 0; row < kWaveSize;) {  // runs of rows of one segment
      const int its = __shfl_sync(~0u, segment, row);
      const unsigned others = __ballot_sync(~0u, segment != its) & (~0u << row);
      const int end = others == 0 ? kWaveSize : __ffs(static_cast<int>(others)) - 1;
      if (its < 0) {
        clear_rows(tile, row, end);
      } else if (Stored::kHasDirectRows && layout_.is_direct(its, is_key)) {
        if (dims < kCfg.shape.head_dim_qk) clear_rows(tile, row, end, dims);
      } else {
        const CacheSegment& s = p.segments[its];
        const KeyScales& scales = is_key ? s.k_scale : s.v_scale;
        kv::with_format(is_key ? s.k_format : s.v_format, [&](auto constant) FLASHPORT_INLINE {
          constexpr KvFormat kFormat = constant;
          if (scales.data == nullptr) {
            widen_rows<kFormat, false>(rows, tile, row, end, dims, scales);
          } else {
            widen_rows<kFormat, true>(rows, tile, row, end, dims, scales);
          }
        });
      }
      row = end;
    }
    mbarrier_arrive_wave(&ring_.ready[place_.stage]);
    place_.next();
    place_.next();
    give_back_slot();
  }

  // Rows [begin, end) of the wave, eight at once: neighbouring lanes have neighbouring rows, whose units of 16 bytes
  // lie in banks of their own. Values that rows do not have become zeros.
  template <KvFormat kFormat, bool kHasScale>
  FLASHPORT_DEVICE void widen_rows(const StoredRows<kCfg>& rows, char* tile, int begin, int end, int dims,
                                   const KeyScales& scales) {
#pragma unroll 1
    for (int row = begin + lane_ % 8; row < end; row += 8 * kRowsAtOnce<kHasScale>) {
#pragma unroll 1
      for (int pass = 0; pass < kPasses; ++pass) {
        const int dim = kBlockValues * (lane_ / 8 + 4 * pass);
        if constexpr (kHasScale) {
          widen_scaled_block<kFormat>(rows, tile, row, dim, dims, scales);
        } else {
          widen_blocks<kFormat>(rows, tile, row, end, dim);
        }
      }
    }
    if (dims < kCfg.shape.head_dim_qk) {
      __syncwarp();
      clear_rows(tile, begin, end, dims);
    }
  }
  // Two rows of a lane hide each other's latency.
  template <bool kHasScale>
  static constexpr int kRowsAtOnce = kHasScale ? 1 : 2;
  template <KvFormat kFormat>
  FLASHPORT_DEVICE void widen_blocks(const StoredRows<kCfg>& rows, char* tile, int row, int end, int dim) {
    constexpr int kRows = kRowsAtOnce<false>;
    Words2 x[kRows][kBlockValues / 4];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int its = first_row_ + minimum(row + 8 * r, end - 1);
      kv::load_block<kMath, kFormat>(x[r], rows.template block<kFormat>(its, dim));
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (row + 8 * r >= end) break;
#pragma unroll
      for (int i = 0; i < kBlockValues / 8; ++i) {
        store_eight(tile, row + 8 * r, dim + 8 * i, x[r][2 * i], x[r][2 * i + 1]);
      }
    }
  }
  // Eight values, which share a factor, at a time: unrolled, the code of all formats takes long to compile.
  template <KvFormat kFormat>
  FLASHPORT_DEVICE void widen_scaled_block(const StoredRows<kCfg>& rows, char* tile, int row, int dim, int dims,
                                           const KeyScales& scales) {
    const auto stored = rows.template block<kFormat>(first_row_ + row, dim);
#pragma unroll 1
    for (int i = 0; i < kBlockValues; i += 8) {
      const float scale = rows.factor(first_row_ + row, scales, minimum(dim + i, dims - 1));
      store_eight(tile, row, dim + i, kv::load_four<kMath, kFormat, true>(stored, i, scale),
                  kv::load_four<kMath, kFormat, true>(stored, i + 4, scale));
    }
  }
  FLASHPORT_DEVICE void store_eight(char* tile, int row, int dim, Words2 low, Words2 high) {
    *unit_of(tile, row, dim) = make_uint4(low.x, low.y, high.x, high.y);
  }
  // From value `dims` on, a multiple of 8.
  FLASHPORT_DEVICE void clear_rows(char* tile, int begin, int end, int dims = 0) {
#pragma unroll 1
    for (int row = begin + lane_ % 8; row < end; row += 8) {
#pragma unroll 1
      for (int dim = dims + 8 * (lane_ / 8); dim < kCfg.shape.head_dim_qk; dim += 32) {
        *unit_of(tile, row, dim) = make_uint4(0, 0, 0, 0);
      }
    }
  }
  FLASHPORT_DEVICE uint4* unit_of(char* tile, int row, int dim) {
    return reinterpret_cast<uint4*>(tile + Layout::offset(first_row_ + row, 2 * dim));
  }

  const Block& block_;
  Ring& ring_;
  Stored& stored_;
  const StoredLayout& layout_;
  const int lane_, first_row_;
  SlotState slot_;
  PipelineState<Ring::kTiles> place_;
  PipelineState<Ring::kQueries> query_;
};

// The producer waves' share of decode(): `producers` has all of them, from thread `first` of the device block on.
template <DecodeConfig kCfg, class Shared>
FLASHPORT_DEVICE void produce_segments(const MixedDecodeParams& p, const Range& range, const Block& producers,
                                       int first, Shared& shared) {
  const StoredLayout layout = stored_layout<kCfg>(p);
  if (producers.wave() < kSegmentCopiers) {
    SegmentCopier<kCfg>(shared.ring, shared.stored, layout, producers.wave(), producers.lane()).run(p, range);
    return;
  }
  constexpr int kSide = side_wideners(kCfg);
  const bool widens_keys = producers.wave() < kSegmentCopiers + kSide;
  const int wave = kSegmentCopiers + (widens_keys ? 0 : kSide);
  const Block block(&shared.arrive_flag, first + wave * kWaveSize, kSide * kWaveSize, 0);
  SegmentWidener<kCfg>(block, shared.ring, shared.stored, layout).run(p, range, widens_keys);
}

}  // namespace flashport::FLASHPORT_TARGET::decode
