// Rows of keys or values on their way through registers where they may lie on pages, and may be of another format than
// the products', which is widened on the way to LDS.
//
// A lane of a wave looks up one of the wave's rows, a tile before it is needed: the page number is then there when an
// address is computed from it, and the lanes that load the row get its offset from that lane.
#pragma once

#include "hip/attention/memory.h"
#include "hip/attention/row_factors.h"

namespace flashport::FLASHPORT_TARGET::attention {

// How a row's values come in loads of 2 kCount bytes, one for every kCount values from a multiple of kCount on, and
// become kCount values of the math type (hip/kv/loaded_row.h).
template <AttentionShape kShape, int kCount>
struct StoredValues {
  static constexpr KeySources kSources = kShape.sources;
  static constexpr bool kHasFactors = has_factors(kSources);

  // The byte of a row where the load of the values from `first` on begins.
  FLASHPORT_DEVICE static unsigned byte(unsigned first, KvFormat format, int columns) {
    const auto dims = static_cast<unsigned>(columns);
    if constexpr (has(kSources, KeySources::kBytes)) return kv::load_begin<kCount>(format, first, dims);
    if (!has(kSources, KeySources::kFp8) || format != KvFormat::kFp8E4M3) return 2 * first;
    return kv::LoadedRow<KvFormat::kFp8E4M3, kCount>::begin(first, dims);
  }
  // Makes values of the math type of what the lane loaded of several rows, the same values of each.
  template <class Words, int kLoads>
  FLASHPORT_DEVICE static void widen(Words (&loads)[kLoads], const RowFactors<kHasFactors, kLoads>& factors,
                                     unsigned first, KvFormat format, const KeyScales& scales, int columns) {
    with_other_format<kSources>(format, [&](auto constant) FLASHPORT_INLINE {
      using Row = kv::LoadedRow<constant, kCount>;
#pragma unroll
      for (Words& x : loads) {
        const Row row(kv::LoadedWords<Words>{x, first}, first, static_cast<unsigned>(columns));
#pragma unroll
        for (int four = 0; four < kCount / 4; ++four) {
          const Words2 wide = widen_four<kShape.math, constant>(row, static_cast<int>(Row::base(first)) + 4 * four);
          x[2 * four] = wide[0];
          x[2 * four + 1] = wide[1];
        }
      }
    });
    factors.multiply(loads, scales);
  }
};

// Keys or values: their cache, their format, the factors beside them, and the dims of a row.
struct KvSide {
  const CacheParams& cache;
  const KeyScales& scales;
  KvFormat format;
  int columns;
};
FLASHPORT_DEVICE KvSide keys_of(const AttentionParams& p) {
  return {p.cache.k, p.k_row_scales, p.k_format, p.head_dim_qk};
}
FLASHPORT_DEVICE KvSide values_of(const AttentionParams& p) {
  return {p.cache.v, p.v_row_scales, p.v_format, p.head_dim_v};
}

// The rows of a tile that a wave copies, of which this lane looks up one.
template <int kKeys, bool kHasFactors>
class RowPlaces {
 public:
  // There are no keys from `end` on. `pages`: null if the cache has no table.
  FLASHPORT_DEVICE void begin(const KvSide& side, const std::int32_t* pages, const WorkTile& work, int head, int tile,
                              int end) {
    const CacheParams& cache = side.cache;
    data_ = (GlobalBytes)cache.data + head * cache.head_stride;
    factors_.begin(side.scales, pages, work, head);
    int first = static_cast<int>(work.k_begin);  // of tokens on pages
    if (pages == nullptr) {
      data_ = first_row(cache, work, work.k_begin, head);
      first = 0;
    }
    next_ = first + tile * kKeys;
    end_ = first + end;
  }
  // Asks for the page of the next tile's key `key`.
  FLASHPORT_DEVICE void look_up(const PagedCache& cache, const std::int32_t* pages, int key) {
    const int token = next_ + key;
    place_ = kv::token_coord(cache, pages, 0, token, token < end_);
    next_ += kKeys;
  }
  // Those of the tile that was looked up last.
  FLASHPORT_DEVICE RowOffsets offsets(const CacheParams& cache) const {
    return {data_, place_.offset < 0 ? RowOffsets::kNone : kv::row_offset(cache, place_, 0)};
  }
  FLASHPORT_DEVICE RowOffsets factor_offsets(const KeyScales& scales) const { return factors_.offsets(scales, place_); }

 private:
  GlobalBytes data_;  // of the head
  int next_, end_;    // tokens of the sequence, or keys: the next tile's first, and after the last
  kv::TokenCoord place_;
  [[no_unique_address]] FactorPlaces<kHasFactors> factors_;
};

}  // namespace flashport::FLASHPORT_TARGET::attention
