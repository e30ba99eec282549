// The keys of a sequence, which kernels of one format read from one cache (DecodeParams; those that append count the
// new ones, too) and those of any format from segments, one after the other (MixedDecodeParams). Kernels that read
// segments of blocks and of 16 bits as they are stored (SegmentsDecodeParams) have leaves of one segment each.
#pragma once

#include <type_traits>

#include "common/device/core/scalar_access.h"
#include "common/device/decode/chunks.h"
#include "common/device/decode/config.h"
#include "common/device/decode/new_keys.h"
#include "common/device/kv/paged_kv.h"

namespace flashport::FLASHPORT_TARGET::decode {

template <DecodeConfig kCfg>
using PlainParams =
    std::conditional_t<!is_of_math_type(kCfg.shape), PlainDecodeParams,
                       PlainDecodeParamsOf<kCfg.shape.math == MathType::kFp16 ? DType::kFloat16 : DType::kBFloat16>>;

template <DecodeConfig kCfg>
using OneCacheParams =
    std::conditional_t<kCfg.shape.plain, PlainParams<kCfg>,
                       std::conditional_t<reads_factors(kCfg.shape), FactorDecodeParams, DecodeParams>>;

// The argument of a kernel.
template <DecodeConfig kCfg>
using DecodeParamsOf =
    std::conditional_t<reads_segments(kCfg.shape), MixedDecodeParams,
                       std::conditional_t<kCfg.shape.has_wide_segments, SegmentsDecodeParams,
                                          std::conditional_t<kCfg.shape.appends, AppendParamsOf<OneCacheParams<kCfg>>,
                                                             OneCacheParams<kCfg>>>>;

template <class Params>
concept Appends = requires(const Params& p) { p.append; };

// load(p): what p points to.
template <class Load = kv::PlainLoad>
FLASHPORT_DEVICE int key_count(const DecodeParams& p, int seq, const Load& load = {}) {
  return kv::sequence_length(p.cache, seq, load);
}
template <class Load = kv::PlainLoad>
FLASHPORT_DEVICE int key_count(const PlainDecodeParams& p, int seq, const Load& load = {}) {
  return kv::sequence_length<true>(p.cache, seq, load);
}
template <Appends Params, class Load = kv::PlainLoad>
FLASHPORT_DEVICE int key_count(const Params& p, int seq, const Load& load = {}) {
  const NewKeys keys = new_keys(p, seq, load);
  return keys.before + keys.count;
}
FLASHPORT_DEVICE int key_count(const MixedDecodeParams& p, int seq) {
  std::int64_t count = 0;
  FLASHPORT_UNROLL(1)
  for (int i = 0; i < p.segment_count; ++i) count += kv::sequence_length(p.segments[i].cache, seq);
  return static_cast<int>(minimum(count, std::int64_t{p.cache.max_len}));
}

// f(segment, its keys, position of the first one, whether they are of 16 bits), for all segments of a sequence.
template <class F>
FLASHPORT_DEVICE void for_each_segment(const SegmentsDecodeParams& p, int seq, F&& f) {
  int keys[kMostSegments];
  FLASHPORT_UNROLL(4)
  for (int i = 0; i < kMostSegments; ++i) {
    keys[i] = i < p.segment_count ? kv::sequence_length<false, false>(p.segments[i].cache, seq) : 0;
  }
  int position = 0;
  FLASHPORT_UNROLL(4)
  for (int i = 0; i < kMostSegments; ++i) {
    const int its = minimum(keys[i], p.cache.max_len - position);
    f(i, its, position, kv_format_trait(p.segments[i].k_format).block_values == 1);
    position += its;
  }
}
// The keys of all leaves, which are those of whole turns.
FLASHPORT_DEVICE int key_count(const SegmentsDecodeParams& p, int seq) {
  int leaves = 0;
  for_each_segment(p, seq, [&](int, int keys, int, bool is_wide) {
    leaves += static_cast<int>(segment_leaves(static_cast<unsigned>(keys), is_wide));
  });
  return leaves * kLeafKeys;
}

// The keys of a turn: `count` of a segment, from its key `first` on, which has `position` in the sequence.
struct alignas(16) TurnKeys {
  std::int32_t first, count, position;
  std::int32_t is_wide;  // of 16 bits

  FLASHPORT_DEVICE int most() const { return 2 * (is_wide ? kWideLeafKeys : kLeafKeys); }
  FLASHPORT_DEVICE bool is_whole() const { return count == most(); }
};

// Finds the turns of query tiles one after the other. Until it comes to another segment or tile it loads nothing.
class SegmentWalk {
 public:
  // The turn that begins with `leaf` of a tile of `seq`.
  FLASHPORT_DEVICE TurnKeys turn(const SegmentsDecodeParams& p, int seq, int leaf) {
    if (seq != seq_ || leaf < begin_ || leaf >= end_) find(p, seq, leaf);
    const int first = (leaf - begin_) * (is_wide_ ? kWideLeafKeys : kLeafKeys);
    TurnKeys turn{first, keys_ - first, position_ + first, is_wide_};
    turn.count = minimum(turn.count, turn.most());
    return turn;
  }
  // What the last turn lies in.
  FLASHPORT_DEVICE const PagedCache& cache(const SegmentsDecodeParams& p) const { return p.segments[segment_].cache; }
  FLASHPORT_DEVICE const std::int32_t* pages() const { return pages_; }

 private:
  FLASHPORT_DEVICE void find(const SegmentsDecodeParams& p, int seq, int leaf) {
    int begin = 0;
    seq_ = seq;
    segment_ = begin_ = end_ = keys_ = 0;
    for_each_segment(p, seq, [&](int segment, int keys, int position, bool is_wide) {
      const int end = begin + static_cast<int>(segment_leaves(static_cast<unsigned>(keys), is_wide));
      if (leaf >= begin && leaf < end) {
        segment_ = segment;
        begin_ = begin;
        end_ = end;
        keys_ = keys;
        position_ = position;
        is_wide_ = is_wide;
      }
      begin = end;
    });
    pages_ = kv::page_list<true>(cache(p), seq);
  }

  int seq_ = -1, segment_ = 0;
  int begin_ = 0, end_ = 0;  // its leaves
  int keys_ = 0, position_ = 0;
  bool is_wide_ = false;
  const std::int32_t* pages_ = nullptr;
};

// Whether a bias says which keys a row sees, in place of its position.
FLASHPORT_DEVICE constexpr bool has_bias(const DecodeParams&) { return false; }
FLASHPORT_DEVICE bool has_bias(const MixedDecodeParams& p) { return p.bias.data != nullptr; }

// The first key of each segment of a sequence. Those that the call does not have begin after all keys.
struct SegmentStarts {
  int first[kMostSegments];
};

FLASHPORT_DEVICE SegmentStarts segment_starts(const MixedDecodeParams& p, int seq) {
  SegmentStarts starts;
  std::int64_t next = 0;
  FLASHPORT_UNROLL(4)
  for (int i = 0; i < kMostSegments; ++i) {
    starts.first[i] = static_cast<int>(minimum(next, std::int64_t{p.cache.max_len}));
    if (i < p.segment_count) next += kv::sequence_length(p.segments[i].cache, seq);
  }
  return starts;
}

// A key of a sequence as a key of the segment that has it.
struct SegmentKey {
  int segment, key;
};

// For a key below the sequence's count; then no segment without keys has it.
FLASHPORT_DEVICE SegmentKey segment_key(const SegmentStarts& starts, int key) {
  SegmentKey at{0, key};
  FLASHPORT_UNROLL(4)
  for (int i = 1; i < kMostSegments; ++i) {
    if (key >= starts.first[i]) at = {i, key - starts.first[i]};
  }
  return at;
}

// Where the segment has the key: its page and offset, from which rows and factors follow. Loads the page's number.
FLASHPORT_DEVICE kv::TokenCoord segment_coord(const CacheSegment& segment, int seq, int key) {
  return kv::token_coord(segment.cache, kv::page_list(segment.cache, seq), seq, key, true);
}

FLASHPORT_DEVICE const char* cache_row(const CacheParams& cache, kv::TokenCoord at, int head) {
  return static_cast<const char*>(cache.data) + kv::row_offset(cache, at, head);
}

// The factor of a whole row; 1 where groups of its values have their own.
FLASHPORT_DEVICE float row_scale(const KeyScales& scales, kv::TokenCoord at, int head) {
  if (scales.data == nullptr || scales.dims_per_scale > 0) return 1.0f;
  return load_as_float(scales.data, scales.dtype, scale_element(scales, at, head));
}

}  // namespace flashport::FLASHPORT_TARGET::decode
