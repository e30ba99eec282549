// Leaves of a cache of segments (common/device/decode/segments.h) on a CPU. Rows are looked up one leaf ahead, as those
// of one cache are; when a leaf's turn comes, the rows that exist are widened into floats, which stay in the core's
// caches, and the products are those of an fp32 cache (kv_products.h). Factors of whole rows wait for the scores and
// for P, as on GPUs; those of groups of values are multiplied in.
#pragma once

#include "common/device/decode/schedule.h"
#include "cpu/decode/leaf.h"
#include "cpu/kv/values.h"

namespace flashport::FLASHPORT_TARGET::decode {

// Keys [low, high) of the leaf's 64 exist. Neighbouring ones of one segment are a run.
struct SegmentLeaf {
  struct Rows {
    const char* at[kLeafKeys];
    std::int64_t scales[kLeafKeys];  // the element of the row's first factor
    alignas(64) float factors[kLeafKeys];
    bool has_factors;
  };
  struct Run {
    int segment, end;
  };
  Rows keys, values;
  Run runs[kMostSegments];
  int low, high;
  const SegmentLeaf* next;  // what is asked for while this leaf is worked on; null: nothing
};

// Looks up the rows of leaves.
class SegmentRows {
 public:
  explicit SegmentRows(const MixedDecodeParams& p) : p_(p) {}

  void look_up(SegmentLeaf& leaf, const Segment& s, int key) {
    if (s.seq != seq_) {
      seq_ = s.seq;
      starts_ = segment_starts(p_, s.seq);
    }
    leaf.low = maximum(s.key_low - key, 0);
    leaf.high = minimum(s.key_high - key, kLeafKeys);
    leaf.keys.has_factors = leaf.values.has_factors = false;
    int run = 0;
    for (int i = leaf.low; i < leaf.high; ++run) {
      const int number = segment_key(starts_, key + i).segment;
      const int end = number + 1 < p_.segment_count ? starts_.first[number + 1] - key : leaf.high;
      leaf.runs[run] = {number, minimum(end, leaf.high)};
      const CacheSegment& segment = p_.segments[number];
      const bool has_k = has_row_factors(segment.k_scale), has_v = has_row_factors(segment.v_scale);
      leaf.keys.has_factors |= has_k;
      leaf.values.has_factors |= has_v;
      for (; i < leaf.runs[run].end; ++i) {
        const kv::TokenCoord at = segment_coord(segment, s.seq, key + i - starts_.first[number]);
        look_up_row(leaf.keys, i, segment.cache.k, segment.k_scale, at, s.kv_head, has_k);
        look_up_row(leaf.values, i, segment.cache.v, segment.v_scale, at, s.kv_head, has_v);
      }
    }
  }

 private:
  static bool has_row_factors(const KeyScales& scales) { return scales.data != nullptr && scales.dims_per_scale == 0; }
  FLASHPORT_DEVICE static void look_up_row(SegmentLeaf::Rows& rows, int i, const CacheParams& cache,
                                           const KeyScales& scales, kv::TokenCoord at, int head, bool has_factor) {
    rows.at[i] = cache_row(cache, at, head);
    rows.scales[i] = scale_element(scales, at, head);
    rows.factors[i] = has_factor ? row_scale(scales, at, head) : 1.0f;
  }

  const MixedDecodeParams& p_;
  int seq_ = -1;
  SegmentStarts starts_;
};

// The rows of a leaf's keys or values, of `dims` values each, as floats; `next` are asked for in between.
[[gnu::noinline]] inline void widen_rows(FloatRows<float> to, const SegmentLeaf& leaf, const SegmentLeaf::Rows& rows,
                                         const SegmentLeaf::Rows* next, const MixedDecodeParams& p, int dims,
                                         bool is_key) {
  int first = leaf.low;
  for (const SegmentLeaf::Run* run = leaf.runs; first < leaf.high; first = run++->end) {
    const CacheSegment& segment = p.segments[run->segment];
    const KvFormat format = is_key ? segment.k_format : segment.v_format;
    const KeyScales& scales = is_key ? segment.k_scale : segment.v_scale;
    const int row_bytes = kv_row_bytes(format, dims);
    kv::with_format(format, [&](auto row, int bytes) {
      for (int key = first; key < run->end; ++key) {
        if (next != nullptr && key >= leaf.next->low && key < leaf.next->high) {
          for (int line = 0; line < row_bytes; line += 64) __builtin_prefetch(next->at[key] + line, 0, 2);
        }
        for (int dim = 0; dim < dims; dim += kVecWidth) {
          Vec values = kv::load_values(row, rows.at[key], bytes, dim, dims - dim);
          if (scales.dims_per_scale > 0) values *= kv::load_factors(scales, rows.scales[key], dim, dims - dim);
          store_vec(to[key] + dim, values);
        }
      }
    });
  }
}

// A leaf's rows as floats.
template <int kDimsQk, int kDimsV>
class WideLeaf {
 public:
  const Leaf& keys(const SegmentLeaf& leaf, const MixedDecodeParams& p) {
    widen_rows({keys_[0], kDimsQk}, leaf, leaf.keys, leaf.next == nullptr ? nullptr : &leaf.next->keys, p,
               p.head_dim_qk, true);
    return view(leaf);
  }
  const Leaf& values(const SegmentLeaf& leaf, const MixedDecodeParams& p) {
    widen_rows({values_[0], kDimsV}, leaf, leaf.values, leaf.next == nullptr ? nullptr : &leaf.next->values, p,
               p.head_dim_v, false);
    return view(leaf);
  }

 private:
  const Leaf& view(const SegmentLeaf& leaf) {
    for (int i = leaf.low; i < leaf.high; ++i) {
      rows_.keys[i] = reinterpret_cast<const char*>(keys_[i]);
      rows_.values[i] = reinterpret_cast<const char*>(values_[i]);
    }
    rows_.low = leaf.low;
    rows_.high = leaf.high;
    rows_.next = nullptr;
    return rows_;
  }

  alignas(64) float keys_[kLeafKeys][kDimsQk], values_[kLeafKeys][kDimsV];
  Leaf rows_;
};

}  // namespace flashport::FLASHPORT_TARGET::decode
