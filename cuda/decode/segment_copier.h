// The waves of a block that copy rows of any formats as they are stored, for others to widen (segment_producer.h). Each
// has the same rows of every tile, a lane looks up one of them.
//
// Rows go to a slot of the ring of stored rows, or straight to their place in the ring of widened tiles.
//
// Where the rows of a wave are of one segment, as nearly all are, some neighbouring lanes copy a row together, and the
// lane that looked a row up copies the few units that these leave over. Else each lane copies its row alone.
#pragma once

#include "cuda/decode/stored_ring.h"

namespace flashport::FLASHPORT_TARGET::decode {

template <DecodeConfig kCfg>
class SegmentCopier {
  using Ring = StoredRing<kCfg>;
  using Tiles = KvRing<kCfg>;
  using Layout = typename KvTiles<kCfg>::Keys;
  using FourUnits = typename Ring::FourUnits;
  static constexpr int kRows = Ring::kCopierRows;
  static constexpr int kAtOnce = 4;                                // rows of a lane whose copies leave together
  static constexpr int kLeastLanes = kAtOnce * kWaveSize / kRows;  // of a row
  static constexpr int kMostLeftOver = 3;                          // units of a row, for its own lane
  static constexpr bool kIsLong = Ring::kLongestRow > (kWaveSize + kMostLeftOver) * kUnitBytes;
  static_assert(kRows <= kWaveSize);

 public:
  FLASHPORT_DEVICE SegmentCopier(Tiles& tiles, Ring& ring, const StoredLayout& layout, int wave, int lane)
      : tiles_(tiles), ring_(ring), layout_(layout), lane_(lane), first_row_(wave * kRows) {}

  FLASHPORT_DEVICE void run(const MixedDecodeParams& p, const Range& range) {
    LeafCursor ahead(range);
    look_up(p, ahead);
    while (!ahead.done()) {
      Found keys, values;
      if (segment_ >= 0) {
        const CacheSegment& s = p.segments[segment_];
        keys = find(s.cache.k, key_rows_, s.k_scale);
        values = find(s.cache.v, value_rows_, s.v_scale);
      }
      const int segment = segment_;
      const bool exists = exists_;
      const int first = __shfl_sync(~0u, segment, 0), last = __shfl_sync(~0u, segment, kRows - 1);
      ahead.next(p, kCfg.tuning.leaves);
      look_up(p, ahead);  // before the copies, behind which it would wait
      __syncwarp();       // the rows before have been read
      if (lane_ < kRows) {
        unit_of(ring_.key_units, lane_) = keys.row - shift_of(keys.row);
        unit_of(ring_.value_units, lane_) = values.row - shift_of(values.row);
      }
      __syncwarp();
#pragma unroll 1
      for (int side = 0; side < 2; ++side) {  // one text of both: misses of the instruction cache cost more
        const Found found{side == 0 ? keys.row : values.row, side == 0 ? keys.factors : values.factors};
        copy_tile(p, side == 0, found, segment, exists, first == last);
      }
    }
    await_copies();
  }

 private:
  // Where the lane's row lies.
  struct Found {
    const char *row = nullptr, *factors = nullptr;
  };

  FLASHPORT_DEVICE const char*& unit_of(FourUnits* units, int row) const {
    return units[(first_row_ + row) / kAtOnce].its[row % kAtOnce];
  }

  // Looks up the lane's row of the turn that `ahead` stands at; in place of one that does not exist, its neighbour.
  // Loads the number of its page.
  FLASHPORT_DEVICE void look_up(const MixedDecodeParams& p, const LeafCursor& ahead) {
    const int before = segment_;
    segment_ = -1;
    if (ahead.done()) return;
    const Segment& s = ahead.segment;
    const bool is_new = s.seq != seq_ || s.kv_head != kv_head_;
    if (s.seq != seq_) starts_ = segment_starts(p, s.seq);
    seq_ = s.seq;
    kv_head_ = s.kv_head;
    const int first = ahead.key() + first_row_;
    const int low = maximum(first, s.key_low), high = minimum(first + kRows, s.key_high);
    if (low >= high) return;  // for all lanes
    const int key = maximum(minimum(first + lane_, high - 1), low);
    exists_ = key == first + lane_;
    const SegmentKey at = segment_key(starts_, key);
    segment_ = at.segment;
    const PagedCache& cache = p.segments[segment_].cache;
    if (is_new || segment_ != before) {
      pages_ = kv::page_list(cache, seq_);
      key_rows_ = static_cast<const char*>(cache.k.data) + kv_head_ * cache.k.head_stride;
      value_rows_ = static_cast<const char*>(cache.v.data) + kv_head_ * cache.v.head_stride;
    }
    coord_ = kv::token_coord(cache, pages_, seq_, at.key, true);
  }
  // `rows`: of the head.
  FLASHPORT_DEVICE Found find(const CacheParams& cache, const char* rows, const KeyScales& scales) const {
    Found found;
    found.row = rows + coord_.page * cache.page_stride + coord_.offset * cache.token_stride;
    if (layout_.has_factors && scales.data != nullptr) {
      found.factors =
          static_cast<const char*>(scales.data) + scale_element(scales, coord_, kv_head_) * factor_bytes(scales);
    }
    return found;
  }

  // `segment`: of the lane's row, -1 if the wave has none; `is_one`: all rows' segment.
  FLASHPORT_DEVICE void copy_tile(const MixedDecodeParams& p, bool is_key, Found found, int segment, bool exists,
                                  bool is_one) {
    mbarrier_wait(&ring_.free[state_.slot], state_.phase ^ 1);
    FourUnits* units = is_key ? ring_.key_units : ring_.value_units;
    const int first = (state_.slot * Ring::kRows + first_row_) * layout_.pitch;
    const unsigned to = shared_address(ring_.bytes) + first;
    const CacheSegment& s = p.segments[maximum(segment, 0)];
    const int bytes = is_key ? s.cache.k.row_bytes : s.cache.v.row_bytes;
    const int end = shift_of(found.row) + bytes;
    const int factors = (end + kUnitBytes - 1) / kUnitBytes * kUnitBytes;  // after the row
    if (lane_ < kRows) {
      ring_.rows[state_.slot][first_row_ + lane_] = {static_cast<std::int8_t>(exists ? segment : -1),
                                                     static_cast<std::uint8_t>(shift_of(found.row)),
                                                     static_cast<std::uint16_t>(factors + shift_of(found.factors))};
    }
    const bool direct = Ring::kHasDirectRows && segment >= 0 && layout_.is_direct(segment, is_key);
    if (Ring::kHasDirectRows && layout_.direct != 0 && __ballot_sync(~0u, direct) != 0) {
      mbarrier_wait(&tiles_.free[place_.stage], place_.phase ^ 1);
    }
    if (segment >= 0) {
      const unsigned tile = shared_address(tiles_.tile(place_.stage));
      int copied = 0;
      if (is_one && !direct) {
        copied = copy_rows(units, bytes,
                           [&](int row, int byte) FLASHPORT_INLINE { return to + row * layout_.pitch + byte; });
      } else if (is_one && __ballot_sync(~0u, !exists && lane_ < kRows) == 0) {  // the others' rows become zeros there
        copied = copy_rows(units, bytes, [&](int row, int byte) FLASHPORT_INLINE {
          return tile + Layout::offset(first_row_ + row, byte);
        });
      }
      if (lane_ < kRows && (!direct || exists)) {
        const int own = lane_ * layout_.pitch;
        const char* from = unit_of(units, lane_);
#pragma unroll 1
        for (int byte = copied; byte < end; byte += kUnitBytes) {
          copy_async_unit(direct ? tile + Layout::offset(first_row_ + lane_, byte) : to + own + byte, from + byte);
        }
        if (layout_.has_factors) {
          copy_factors(found.factors, is_key ? s.k_scale : s.v_scale, is_key ? p.head_dim_qk : p.head_dim_v,
                       ring_.bytes + (first + own + factors));
        }
      }
    }
    mbarrier_arrive_on_copies(&ring_.ready[state_.slot]);
    mbarrier_arrive_wave(&ring_.ready[state_.slot]);
    state_.next(layout_.slots);
    place_.next();
  }

  // Copies the units that all rows have but for the last ones: neighbouring lanes bring neighbours, each lane those of
  // rows that follow each other. Returns their bytes. What is read before a row lies in the unit of its first byte.
  // place(row, byte): where a byte goes in shared memory.
  template <class Place>
  FLASHPORT_DEVICE int copy_rows(const FourUnits* rows, int bytes, const Place& place) const {
    const int units = (bytes + kUnitBytes - 1) / kUnitBytes;
    int lanes = maximum(1 << (31 - __clz(units)), kLeastLanes);  // of a row, a power of two
    if (units > lanes + kMostLeftOver) lanes *= 2;
    lanes = minimum(lanes, kWaveSize);
    const int its_fours = lanes / kLeastLanes;
    const int first = (lane_ >> (31 - __clz(lanes))) * its_fours;
    int last = lanes;
    if constexpr (kIsLong) {
      const int left_over = units % kWaveSize;
      if (units > kWaveSize) last = left_over > kMostLeftOver ? units : units - left_over;
    }
    last = minimum(last, units);
    rows += first_row_ / kAtOnce;
#pragma unroll 1
    for (int unit = lane_ & (lanes - 1); unit < last; unit += kWaveSize) {
      const int byte = unit * kUnitBytes;
#pragma unroll 1
      for (int four = first; four < first + its_fours; ++four) {
        const FourUnits from = rows[four];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) copy_async_unit(place(kAtOnce * four + i, byte), from.its[i] + byte);
      }
      if constexpr (!kIsLong) break;
    }
    return last * kUnitBytes;
  }

  // A lane copies the factors of its row: few bytes, and not always side by side.
  FLASHPORT_DEVICE static void copy_factors(const char* from, const KeyScales& scales, int dims, char* to) {
    if (from == nullptr) return;
    const int size = factor_bytes(scales), count = factors_of_row(scales, dims), shift = shift_of(from);
    if (!has_separate_factors(scales)) {
#pragma unroll 1
      for (int byte = 0; byte < shift + count * size; byte += kUnitBytes) {
        copy_async_unit(shared_address(to) + byte, from - shift + byte);
      }
      return;
    }
    to += shift;
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const char* its = from + i * size * scales.stride_group;
      if (size == 2) {
        reinterpret_cast<std::uint16_t*>(to)[i] = *reinterpret_cast<const std::uint16_t*>(its);
      } else {
        reinterpret_cast<unsigned*>(to)[i] = *reinterpret_cast<const unsigned*>(its);
      }
    }
  }

  Tiles& tiles_;
  Ring& ring_;
  const StoredLayout& layout_;
  const int lane_, first_row_;
  SlotState state_;
  PipelineState<Tiles::kTiles> place_;
  int seq_ = -1, kv_head_ = -1, segment_ = -1;  // of the row that the lane has looked up
  bool exists_ = false;
  SegmentStarts starts_;
  const std::int32_t* pages_ = nullptr;  // of the sequence in the segment
  const char *key_rows_ = nullptr, *value_rows_ = nullptr;
  kv::TokenCoord coord_{};
};

}  // namespace flashport::FLASHPORT_TARGET::decode
