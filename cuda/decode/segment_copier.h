// The waves of a block that copy rows of any formats as they are stored, for others to widen (segment_producer.h). Each
// has the same rows of every tile, a lane looks up one of them.
#pragma once

#include "cuda/decode/stored_ring.h"

namespace flashport::FLASHPORT_TARGET::decode {

template <DecodeConfig kCfg>
class SegmentCopier {
  using Ring = StoredRing<kCfg>;
  static constexpr int kRows = Ring::kCopierRows;
  static constexpr int kAtOnce = 4;                                // rows of a lane whose copies leave together
  static constexpr int kLeastLanes = kAtOnce * kWaveSize / kRows;  // of a row
  static_assert(kRows <= kWaveSize);

 public:
  FLASHPORT_DEVICE SegmentCopier(Ring& ring, const StoredLayout& layout, int wave, int lane)
      : ring_(ring), layout_(layout), lane_(lane), first_row_(wave * kRows) {}

  FLASHPORT_DEVICE void run(const MixedDecodeParams& p, const Range& range) {
    LeafCursor ahead(range);
    look_up(p, ahead);
    while (!ahead.done()) {
      Found keys, values;
      if (segment_ >= 0) {
        const CacheSegment& s = p.segments[segment_];
        keys = find(s.cache.k, s.k_scale, ahead.segment.kv_head, p.head_dim_qk);
        values = find(s.cache.v, s.v_scale, ahead.segment.kv_head, p.head_dim_v);
      }
      const int segment = segment_;
      ahead.next(p, kCfg.tuning.leaves);
      look_up(p, ahead);  // before the copies, behind which it would wait
      copy_tile(keys, segment, segment < 0 ? nullptr : &p.segments[segment].k_scale);
      copy_tile(values, segment, segment < 0 ? nullptr : &p.segments[segment].v_scale);
    }
    await_copies();
  }

 private:
  // Of the lane's row.
  struct Found {
    RowSource row{}, factors{};
  };

  // Looks up the lane's row of the turn that `ahead` stands at. Loads the number of its page.
  FLASHPORT_DEVICE void look_up(const MixedDecodeParams& p, const LeafCursor& ahead) {
    segment_ = -1;
    if (ahead.done()) return;
    const Segment& s = ahead.segment;
    if (s.seq != seq_) {
      seq_ = s.seq;
      starts_ = segment_starts(p, seq_);
    }
    const int key = ahead.key() + first_row_ + lane_;
    if (lane_ >= kRows || key < s.key_low || key >= s.key_high) return;
    const SegmentKey at = segment_key(starts_, key);
    segment_ = at.segment;
    place_ = segment_coord(p.segments[segment_], seq_, at.key);
  }
  FLASHPORT_DEVICE Found find(const CacheParams& cache, const KeyScales& scales, int head, int dims) const {
    Found found;
    found.row = row_source(cache_row(cache, place_, head), cache.row_bytes);
    if (scales.data != nullptr) found.factors = factor_source(scales, place_, head, dims);
    return found;
  }

  // `scales`: of the row's segment; null: there is no such row.
  FLASHPORT_DEVICE void copy_tile(const Found& found, int segment, const KeyScales* scales) {
    mbarrier_wait(&ring_.free[state_.slot], state_.phase ^ 1);
    char* to = ring_.bytes + (state_.slot * Ring::kRows + first_row_) * layout_.pitch;
    const int factors = (found.row.end + kUnitBytes - 1) / kUnitBytes * kUnitBytes;  // after the row
    if (lane_ < kRows) {
      ring_.rows[state_.slot][first_row_ + lane_] = {static_cast<std::int8_t>(segment),
                                                     static_cast<std::uint8_t>(found.row.shift),
                                                     static_cast<std::uint16_t>(factors + found.factors.shift)};
    }
    copy_rows(found.row, to);
    if (layout_.has_factors && scales != nullptr) {
      copy_factors(found.factors, *scales, to + lane_ * layout_.pitch + factors);
    }
    mbarrier_arrive_on_copies(&ring_.ready[state_.slot]);
    mbarrier_arrive_wave(&ring_.ready[state_.slot]);
    state_.next(layout_.slots);
  }

  // Units of rows, of which neighbouring lanes bring neighbours. What is read before and after a row lies in the units
  // of its first and its last byte.
  FLASHPORT_DEVICE void copy_rows(const RowSource& source, char* to) {
    __syncwarp();  // the sources before have been read
    RowSource* sources = ring_.sources + first_row_;
    if (lane_ < kRows) sources[lane_] = source;
    __syncwarp();
    const int units = layout_.row_units;
    const int lanes = units > 16 ? 32 : units > 8 ? 16 : maximum(units > 4 ? 8 : 4, kLeastLanes);  // of a row
    const int shift = 31 - __clz(lanes);
    const int unit = kUnitBytes * (lane_ & (lanes - 1));
    const int rows = kWaveSize >> shift;  // at once
    const RowSource* from = sources + (lane_ >> shift);
    char* at = to + (lane_ >> shift) * layout_.pitch + unit;
    const int step = rows * layout_.pitch;
#pragma unroll 1
    for (int row = 0; row < kRows; row += kAtOnce * rows, from += kAtOnce * rows, at += kAtOnce * step) {
      RowSource its[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) its[i] = from[i * rows];
      if (units <= kWaveSize) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          if (unit < its[i].end) copy_async_unit(at + i * step, its[i].units + unit);
        }
      } else {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll 1
          for (int byte = unit; byte < its[i].end; byte += kWaveSize * kUnitBytes) {
            copy_async_unit(at + i * step + (byte - unit), its[i].units + byte);
          }
        }
      }
    }
  }

  // A lane copies the factors of its row: few bytes, and not always side by side.
  FLASHPORT_DEVICE static void copy_factors(const RowSource& source, const KeyScales& scales, char* to) {
    if (!has_separate_factors(scales)) {
#pragma unroll 1
      for (int byte = 0; byte < source.end; byte += kUnitBytes) {
        copy_async_unit(to + byte, source.units + byte);
      }
      return;
    }
    const int size = factor_bytes(scales);
    const char* from = source.units + source.shift;
    to += source.shift;
#pragma unroll 1
    for (int i = 0; i < (source.end - source.shift) / size; ++i) {
      const char* its = from + i * size * scales.stride_group;
      if (size == 2) {
        reinterpret_cast<std::uint16_t*>(to)[i] = *reinterpret_cast<const std::uint16_t*>(its);
      } else {
        reinterpret_cast<unsigned*>(to)[i] = *reinterpret_cast<const unsigned*>(its);
      }
    }
  }

  Ring& ring_;
  const StoredLayout& layout_;
  const int lane_, first_row_;
  SlotState state_;
  int seq_ = -1, segment_ = -1;  // of the row that the lane has looked up
  SegmentStarts starts_;
  kv::TokenCoord place_{};
};

}  // namespace flashport::FLASHPORT_TARGET::decode
