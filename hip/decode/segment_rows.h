// Leaves of a cache of segments (common/device/decode/segments.h) on their way to matrix instructions. A leaf's places
// are looked up one leaf ahead, and its lines are asked for. When its turn comes, the block widens its keys, and after
// the scores its values, to the math type, with the factors that lie beside the cache, into one tile of shared memory,
// from which waves read what they multiply: from there on nothing depends on a format.
//
// A thread widens spans of 32 values, a block of ggml's formats, or a part of one. Neighbouring rows of one segment are
// a run; its format is the same for all threads. Rows that the leaf does not have, and dims that a row does not have,
// are zero.
#pragma once

#include "common/device/decode/schedule.h"
#include "common/device/kv/widen.h"

namespace flashport::FLASHPORT_TARGET::decode {

inline constexpr int kBlockValues = 32;  // of ggml's formats

// What a leaf is widened to at a time: all dims of its keys or, where they are many, half of them; all of its values
// or half of these.
template <DecodeConfig kCfg>
struct WideTile {
  static constexpr int kQk = kCfg.shape.head_dim_qk, kV = kCfg.shape.head_dim_v, kMostDims = kQk > kV ? kQk : kV;
  static constexpr int kKeyDims = kCfg.shape.head_dim_qk > 256 ? kCfg.shape.head_dim_qk / 2 : kCfg.shape.head_dim_qk;
  static constexpr int kValues = kCfg.shape.head_dim_v > 256 ? kLeafKeys / 2 : kLeafKeys;
  // A pitch of 16 bytes more than a power of two spreads rows over the banks.
  using Keys = std::uint16_t[kLeafKeys][kKeyDims + 8];
  using Values = std::uint16_t[kValues][kCfg.shape.head_dim_v + 8];
  union {
    alignas(16) Keys keys;
    alignas(16) Values values;
  };
  kv::TokenCoord places[kLeafKeys];
};

// A row in device memory, from some byte on.
struct GlobalRow {
  GlobalBytes at;
  FLASHPORT_DEVICE unsigned word(int byte) const { return load_words<1>(at + byte)[0]; }
  FLASHPORT_DEVICE unsigned half(int byte) const { return load_half_word(at + byte); }
};

template <DecodeConfig kCfg>
class SegmentRows {
  static constexpr MathType kMath = kCfg.shape.math;
  static constexpr KvFormat kProducts = product_format(kCfg.shape, KvFormat::kAny);
  using Tile = WideTile<kCfg>;
  // Where the tile has halves, the code of all formats is there twice as often, and no part of a kernel may be farther
  // from another than a branch reaches.
  static constexpr int kSpan = Tile::kMostDims <= 256 ? kBlockValues : kWaveSize == 64 ? kBlockValues / 2 : 8;
  static constexpr int kOctets = kSpan / 8;  // of values that share a factor
  // Lanes have a key each; so many of them have its row of K, and as many its row of V.
  static constexpr int kSideParts = kCfg.tuning.waves * kWaveSize / kLeafKeys / 2;
  static constexpr int kTouches = (2 * Tile::kMostDims / 128 + kSideParts) / kSideParts;
  static_assert(kSideParts > 0);

 public:
  FLASHPORT_DEVICE SegmentRows(const MixedDecodeParams& p, const Block& block, Tile& tile)
      : p_(p), block_(block), tile_(tile) {}

  // Looks up the leaf that `ahead` is at, a lane each key. Its turn comes with begin_leaf().
  FLASHPORT_DEVICE void look_up(const LeafCursor& ahead) {
    const Segment& s = ahead.segment;
    if (s.seq != next_.seq) next_.starts = segment_starts(reread(p_), s.seq);
    next_.seq = s.seq;
    next_.kv_head = s.kv_head;
    next_.first = ahead.key();
    next_.low = maximum(s.key_low - next_.first, 0);
    next_.high = ahead.done() ? 0 : minimum(s.key_high - next_.first, kLeafKeys);
    place_ = {0, -1};
    const int key = block_.thread() % kLeafKeys;
    for_each_run(next_, 0, kLeafKeys, [&](const CacheSegment& segment, int first, int low, int high) FLASHPORT_INLINE {
      if (key >= low && key < high) place_ = segment_coord(segment, next_.seq, next_.first + key - first);
    });
  }

  // Asks for the lines of the leaf that was looked up, so that its spans are near when they are loaded. It comes after
  // this leaf's last load: loads return in order.
  FLASHPORT_DEVICE void touch() {
    constexpr int kLine = 128;
    const int part = block_.wave() * kWaveSize / kLeafKeys, key = block_.thread() % kLeafKeys;
    for_each_run(next_, 0, kLeafKeys, [&](const CacheSegment& segment, int, int low, int high) FLASHPORT_INLINE {
      if (key < low || key >= high) return;
      const CacheParams& cache = part % 2 == 0 ? segment.cache.k : segment.cache.v;
      const GlobalBytes row = (GlobalBytes)(cache.data) + kv::row_offset(cache, place_, next_.kv_head);
      FLASHPORT_UNROLL(16)
      for (int i = 0; i < kTouches; ++i) {
        const int byte = (part / 2 + i * kSideParts) * kLine;
        if (byte <= cache.row_bytes) touched_[i] = load_words<1>(row + minimum(byte, cache.row_bytes - 4))[0];
      }
    });
  }

  // After it the tile may be written. Holds a barrier.
  FLASHPORT_DEVICE void begin_leaf() {
    FLASHPORT_UNROLL(16)
    for (const unsigned touched : touched_) await_word(touched);
    now_ = next_;
    if (block_.thread() < kLeafKeys) tile_.places[block_.thread()] = place_;
    sync_shared();
  }

  // The keys' dims from `first` on, or the values from `first` on, as many as the tile has. Ends in a barrier.
  FLASHPORT_DEVICE void widen_keys(int first) const {
    widen(tile_.keys, 0, first, p_.head_dim_qk, [](const CacheSegment& segment) FLASHPORT_INLINE {
      return Side{segment.cache.k, segment.k_scale, segment.k_format};
    });
  }
  FLASHPORT_DEVICE void widen_values(int first) const {
    widen(tile_.values, first, 0, p_.head_dim_v, [](const CacheSegment& segment) FLASHPORT_INLINE {
      return Side{segment.cache.v, segment.v_scale, segment.v_format};
    });
  }

 private:
  struct Side {
    const CacheParams& cache;
    const KeyScales& scales;
    KvFormat format;
  };
  // Keys [low, high) of the leaf that begins at key `first` exist.
  struct LeafKeys {
    int seq = -1, kv_head, first, low, high;
    SegmentStarts starts;
  };

  // f(segment, its first key, rows [low, high) of the leaf that it has), of rows [from, to)
  template <class F>
  FLASHPORT_DEVICE void for_each_run(const LeafKeys& leaf, int from, int to, const F& f) const {
    const int end = minimum(leaf.high, to);
    FLASHPORT_UNROLL(1)
    for (int low = maximum(leaf.low, from); low < end;) {
      const SegmentKey at = segment_key(leaf.starts, leaf.first + low);
      int high = end;
      FLASHPORT_UNROLL(4)
      for (int i = 1; i < kMostSegments; ++i) {
        if (i > at.segment) high = minimum(high, leaf.starts.first[i] - leaf.first);
      }
      f(reread(p_).segments[at.segment], leaf.first + low - at.key, low, high);
      low = high;
    }
  }

  // Rows from `first_row` on, from `first_dim` of a row's `dims` values on.
  template <int kRows, int kPitch, class F>
  FLASHPORT_DEVICE void widen(std::uint16_t (&tile)[kRows][kPitch], int first_row, int first_dim, int dims,
                              const F& side_of) const {
    constexpr int kSpans = (kPitch - 8) / kSpan;
    const auto for_each_span = [&](int low, int high, const auto& f) FLASHPORT_INLINE {
      FLASHPORT_UNROLL(1)
      for (int i = low * kSpans + block_.thread(); i < high * kSpans; i += block_.threads()) {
        const int row = i / kSpans, at = i % kSpans * kSpan;
        unsigned x[kSpan / 2] = {};
        f(x, row, first_dim + at);
        auto* to = reinterpret_cast<Words4*>(&tile[row - first_row][at]);
        FLASHPORT_UNROLL(4)
        for (int word = 0; word < kSpan / 2; word += 4) {
          to[word / 4] = Words4{x[word], x[word + 1], x[word + 2], x[word + 3]};
        }
      }
    };
    const auto nothing = [](auto&, int, int) FLASHPORT_INLINE {};
    const int end = first_row + kRows;
    for_each_span(first_row, minimum(now_.low, end), nothing);
    for_each_run(now_, first_row, end, [&](const CacheSegment& segment, int, int low, int high) FLASHPORT_INLINE {
      const Side side = side_of(segment);
      for_each_span(low, high, [&](auto& x, int row, int dim) FLASHPORT_INLINE {
        if (dim < dims) widen_span(x, side, tile_.places[row], dim, minimum(dims - dim, kSpan));
      });
    });
    for_each_span(maximum(maximum(now_.high, now_.low), first_row), end, nothing);
    sync_shared();
  }

  // `count` values from `dim` on, a multiple of 8.
  FLASHPORT_DEVICE void widen_span(unsigned (&x)[kSpan / 2], const Side& side, kv::TokenCoord place, int dim,
                                   int count) const {
    const int head = recompute_scalar(now_.kv_head);
    const bool has_factors = side.scales.data != nullptr;
    float factors[kOctets] = {};
    if (has_factors) load_factors(factors, side.scales, kv::scale_element(side.scales, place, head), dim, count);
    const GlobalBytes row = (GlobalBytes)(side.cache.data) + kv::row_offset(side.cache, place, head);
    const int inside = kSpan == kBlockValues ? 0 : dim % kBlockValues;
    BlockScale scale;
    kv::with_format(side.format, [&](auto constant) FLASHPORT_INLINE {
      constexpr KvFormat kStored = constant;
      constexpr KvFormat kFormat = kStored == KvFormat::kBf16 ? KvFormat::kFp16 : kStored;  // either as it is
      constexpr bool kMayEndInside = kv_format_trait(kFormat).block_values == 1;
      const GlobalRow block{row + kv_row_bytes(kFormat, dim - inside)};
      if constexpr (kv::kInBlocks<kFormat>) scale = {true, kv::block_scale<kFormat>(block, 0), 0};
      if constexpr (kv::kHasMinimum<kFormat>) scale.minimum = kv::block_minimum<kFormat>(block, 0);
      FLASHPORT_UNROLL(8)
      for (int i = 0; i < kSpan; i += 4) {
        const int first = kMayEndInside && i / 8 * 8 >= count ? i % 8 : i;  // past the end its first ones, to be zeroed
        const Words2 two = kv::stored_four<kFormat>(block, inside + first);
        x[i / 2] = two.x;
        x[i / 2 + 1] = two.y;
      }
    });
    if (has_factors || (side.format != kProducts && (kMath == MathType::kBf16 || side.format == KvFormat::kBf16))) {
      finish_by_floats(x, side.format, scale, has_factors, factors);
    } else if (scale.exists) {
      FLASHPORT_UNROLL(16)
      for (unsigned& two : x) two = fma_halves(two, kv::both_halves(scale.scale), kv::both_halves(scale.minimum));
    }
    if (count < kSpan) {
      FLASHPORT_UNROLL(16)
      for (int i = 0; i < kSpan / 2; ++i) x[i] = 2 * i < count ? x[i] : 0;
    }
  }

  // The factors of a block, as fp16.
  struct BlockScale {
    bool exists = false;
    unsigned scale = 0x3c00, minimum = 0;  // 1 and 0
  };

  // Values stored as fp16 or bf16, in the math type and rounded to it once.
  FLASHPORT_DEVICE static void finish_by_floats(unsigned (&x)[kSpan / 2], KvFormat format, const BlockScale& block,
                                                bool has_factors, const float (&factors)[kOctets]) {
    FLASHPORT_UNROLL(16)
    for (int i = 0; i < kSpan / 2; ++i) {
      const Floats2 stored = format == KvFormat::kBf16 ? bf16_to_floats(x[i]) : halves_to_floats(x[i]);
      const float factor = has_factors ? factors[i / 4] : 1.0f;
      const float scale = kv::half_to_float(block.scale) * factor, minimum = kv::half_to_float(block.minimum) * factor;
      const Floats2 wide{fma_rn(stored.x, scale, minimum), fma_rn(stored.y, scale, minimum)};
      x[i] = kMath == MathType::kBf16 ? floats_to_bf16(wide) : floats_to_halves(wide);
    }
  }

  // The factor of each eight values.
  FLASHPORT_DEVICE static void load_factors(float (&to)[kOctets], const KeyScales& scales, std::int64_t element,
                                            int dim, int count) {
    Element loaded[kOctets];
    FLASHPORT_UNROLL(4)
    for (int octet = 0; octet < kOctets; ++octet) {
      const int first = dim + (8 * octet < count ? 8 * octet : 0);
      const int group = scales.dims_per_scale > 0 ? first / scales.dims_per_scale : 0;
      loaded[octet] = load_element(scales.data, scales.dtype, element + group * scales.stride_group);
    }
    FLASHPORT_UNROLL(4)
    for (int octet = 0; octet < kOctets; ++octet) to[octet] = to_float(loaded[octet], scales.dtype);
  }

  const MixedDecodeParams& p_;
  const Block& block_;
  Tile& tile_;
  LeafKeys now_, next_;
  kv::TokenCoord place_;
  unsigned touched_[kTouches] = {};
};

}  // namespace flashport::FLASHPORT_TARGET::decode
