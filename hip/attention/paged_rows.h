// Rows of keys or values on their way through registers where they may lie on pages, and may be e4m3, which is widened
// on the way to LDS.
//
// A lane of a wave looks up one of the wave's rows, a tile before it is needed: the page number is then there when an
// address is computed from it, and the lanes that load the row get its offset from that lane.
#pragma once

#include <limits>

#include "hip/attention/memory.h"
#include "hip/attention/widen.h"

namespace flashport::FLASHPORT_TARGET::attention {

// The value of lane `lane` of the wave.
FLASHPORT_DEVICE unsigned value_of_lane(unsigned x, unsigned lane) {
  return static_cast<unsigned>(__builtin_amdgcn_ds_bpermute(static_cast<int>(lane * 4), static_cast<int>(x)));
}

// Where the rows of a tile begin, each in the lane that looked it up.
struct RowOffsets {
  static constexpr std::int64_t kNone = std::numeric_limits<std::int64_t>::min();  // of no row; strides may be negative
  GlobalBytes data;
  std::int64_t own;

  // The address of byte `byte` of the row of lane `lane`, or of zeros.
  FLASHPORT_DEVICE GlobalBytes address(unsigned lane, unsigned byte, bool is_live) const {
    const Words2 words = __builtin_bit_cast(Words2, own);
    const Words2 theirs = {value_of_lane(words[0], lane), value_of_lane(words[1], lane)};
    const bool is_row = theirs[1] != static_cast<unsigned>(kNone >> 32);
    return is_live && is_row ? data + __builtin_bit_cast(std::int64_t, theirs) + byte : zero_row();
  }
};

// The byte of a row where a load of kCount values from `first` on begins, which takes 2 kCount bytes in either format.
// These hold twice as many values of e4m3; the last load of a row begins early enough to end with it.
template <int kCount>
FLASHPORT_DEVICE unsigned stored_byte(unsigned first, bool is_fp8, int columns) {
  return is_fp8 ? minimum(first, static_cast<unsigned>(columns) - 2 * kCount) : 2 * first;
}
// Whether the values of e4m3 are the second half of those bytes.
template <int kCount>
FLASHPORT_DEVICE bool is_second_half(unsigned first, int columns) {
  return first > static_cast<unsigned>(columns) - 2 * kCount;
}

// The rows of a tile that a wave copies, of which this lane looks up one.
template <int kKeys>
class RowPlaces {
 public:
  // There are no keys from `end` on. `pages`: null if the cache has no table.
  FLASHPORT_DEVICE void begin(const CacheParams& cache, const std::int32_t* pages, const WorkTile& work, int head,
                              int tile, int end) {
    data_ = (GlobalBytes)cache.data + head * cache.head_stride;
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

 private:
  GlobalBytes data_;  // of the head
  int next_, end_;    // tokens of the sequence, or keys: the next tile's first, and after the last
  kv::TokenCoord place_;
};

// Copies of a tile's rows as they are: rows of kVectors vectors, of which each group of waves copies its part. Where
// they are e4m3, a vector is eight bytes in memory. kOffset(row, vector) is the vector's byte offset in LDS.
template <AttentionConfig kCfg, int kVectors, auto kOffset>
class PagedRowCopies {
  static constexpr bool kMayBeFp8 = has(kCfg.shape.sources, KeySources::kFp8);
  static constexpr int kOwnRows = kCfg.tuning.keys / groups_of(kCfg);
  static constexpr int kLoadRows = kGroupThreads / kVectors, kLoads = kOwnRows / kLoadRows;
  static constexpr int kWaveRowsOfLoad = kWaveSize / kVectors, kWaveRowsOfTile = kLoads * kWaveRowsOfLoad;
  static_assert(kLoads * kLoadRows == kOwnRows && kWaveRowsOfLoad >= 1 && kWaveRowsOfTile <= kWaveSize);

 public:
  FLASHPORT_DEVICE void begin(const CacheParams& cache, const std::int32_t* pages, const WorkTile& work,
                              const Block& block, int head, int tile, int end) {
    places_.begin(cache, pages, work, head, tile, end);
    const int thread = block.thread() % kGroupThreads;
    to_ = kOffset(block.wave() / kGroupWaves * kOwnRows + thread / kVectors, thread % kVectors);
  }
  FLASHPORT_DEVICE void look_up(const PagedCache& cache, const std::int32_t* pages, const Block& block) {
    const int own = static_cast<unsigned>(block.thread()) % kWaveRowsOfTile;
    const int first = block.wave() / kGroupWaves * kOwnRows + block.wave() % kGroupWaves * kWaveRowsOfLoad;
    places_.look_up(cache, pages, first + own / kWaveRowsOfLoad * kLoadRows + own % kWaveRowsOfLoad);
  }
  FLASHPORT_DEVICE void load(const CacheParams& cache, const Block& block, bool is_fp8, int columns) {
    const RowOffsets offsets = places_.offsets(cache);
    const auto thread = static_cast<unsigned>(block.thread());
    const unsigned first = thread % kVectors * 8, lane = thread % kWaveSize / kVectors;
    const unsigned byte = stored_byte<8>(first, kMayBeFp8 && is_fp8, columns);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const bool is_live = first < static_cast<unsigned>(columns);
      rows_[i] = load_words<4>(offsets.address(lane + i * kWaveRowsOfLoad, byte, is_live));
    }
  }
  FLASHPORT_DEVICE void store(unsigned char* tiles, const Block& block, bool is_fp8, int columns, int next_tile) {
    if (kMayBeFp8 && is_fp8) widen(block, columns);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      *reinterpret_cast<Words4*>(tiles + to_ + i * kLoadRows * kVectors * kVectorBytes) = rows_[i];
    }
    to_ ^= next_tile;
  }

 private:
  FLASHPORT_DEVICE void widen(const Block& block, int columns) {
    if constexpr (kMayBeFp8) {
      const bool second = is_second_half<8>(static_cast<unsigned>(block.thread()) % kVectors * 8, columns);
#pragma unroll
      for (Words4& x : rows_) {
        const Words2 low = widen_e4m3<kCfg.shape.math>(second ? x[2] : x[0]);
        const Words2 high = widen_e4m3<kCfg.shape.math>(second ? x[3] : x[1]);
        x = Words4{low[0], low[1], high[0], high[1]};
      }
    }
  }

  RowPlaces<kCfg.tuning.keys> places_;
  int to_;  // byte offset in LDS of the thread's first vector
  Words4 rows_[kLoads];
};

}  // namespace flashport::FLASHPORT_TARGET::attention
