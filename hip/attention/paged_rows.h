// Rows of keys or values on their way through registers where they may lie on pages, and may be of another format than
// the products', which is widened on the way to LDS.
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

// How a row's values come in loads of 2 kCount bytes, one for every kCount values from a multiple of kCount on: those
// of 16 bits fill it. Fewer bits: a load has more than the lane's values, and the last of a row, or of a block, begins
// early enough to end with it. The lanes of a block share what its values share: the first one loads it.
template <AttentionShape kShape, int kCount>
struct StoredValues {
  static constexpr KeySources kSources = kShape.sources;
  static constexpr unsigned kBlock = kv::kQ8Values, kLanes = kBlock / kCount;  // of a block of q8_0
  static constexpr unsigned kScaleBytes = kv_format_trait(KvFormat::kQ8_0).scale_bytes;

  // The byte of a row where the load of the values from `first` on begins.
  FLASHPORT_DEVICE static unsigned byte(unsigned first, KvFormat format, int columns) {
    const bool is_wider = has(kSources, KeySources::kBytes) ? is_wide(format) : format != KvFormat::kFp8E4M3;
    if (!has(kSources, KeySources::kFp8) || is_wider) return 2 * first;
    const unsigned of_bytes = minimum(first, static_cast<unsigned>(columns) - 2 * kCount);
    if (!has(kSources, KeySources::kBytes) || format != KvFormat::kQ8_0) return of_bytes;
    const unsigned at = first % kBlock, last = kv::kQ8Bytes - 2 * kCount;
    return first / kBlock * kv::kQ8Bytes + (at == 0 ? 0 : minimum(at + kScaleBytes, last));
  }
  // Makes values of the math type of what the lane loaded of several rows, the same values of each.
  template <class Words, int kLoads>
  FLASHPORT_DEVICE static void widen(Words (&loads)[kLoads], unsigned first, KvFormat format, int columns,
                                     unsigned lane) {
    with_other_format<kSources>(format, [&](auto constant) FLASHPORT_INLINE {
      constexpr KvFormat kFormat = constant;
      constexpr bool kInBlocks = kFormat == KvFormat::kQ8_0;
      const unsigned at = kInBlocks ? first % kBlock : first, end = kInBlocks ? kBlock : static_cast<unsigned>(columns);
      const bool is_second = at > end - 2 * kCount;
#pragma unroll
      for (Words& x : loads) {
        if constexpr (is_wide(kFormat)) {
#pragma unroll
          for (int i = 0; i < kCount / 2; ++i) x[i] = bf16_to_halves(x[i]);
        } else {
          const unsigned scale = kInBlocks ? value_of_lane(x[0], lane / kLanes * kLanes) : 0;
          unsigned two[kCount / 2];
#pragma unroll
          for (int i = 0; i < kCount / 4; ++i) {
            unsigned four = is_second ? x[kCount / 4 + i] : x[i];
            if (kInBlocks && at == 0) four = __builtin_amdgcn_alignbyte(x[i + 1], x[i], kScaleBytes);
            const Words2 widened = widen_four<kShape.math, kFormat>(four, scale);
            two[2 * i] = widened[0];
            two[2 * i + 1] = widened[1];
          }
#pragma unroll
          for (int i = 0; i < kCount / 2; ++i) x[i] = two[i];
        }
      }
    });
  }
};

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
// they are of another format, they are widened on the way. kOffset(row, vector) is the vector's byte offset in LDS.
template <AttentionConfig kCfg, int kVectors, auto kOffset>
class PagedRowCopies {
  using Values = StoredValues<kCfg.shape, 8>;
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
  FLASHPORT_DEVICE void load(const CacheParams& cache, const Block& block, KvFormat format, int columns) {
    const RowOffsets offsets = places_.offsets(cache);
    const auto thread = static_cast<unsigned>(block.thread());
    const unsigned first = thread % kVectors * 8, lane = thread % kWaveSize / kVectors;
    const unsigned byte = Values::byte(first, format, columns);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const bool is_live = first < static_cast<unsigned>(columns);
      rows_[i] = load_words<4>(offsets.address(lane + i * kWaveRowsOfLoad, byte, is_live));
    }
  }
  FLASHPORT_DEVICE void store(unsigned char* tiles, const Block& block, KvFormat format, int columns, int next_tile) {
    const auto thread = static_cast<unsigned>(block.thread());
    Values::widen(rows_, thread % kVectors * 8, format, columns, thread % kWaveSize);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      *reinterpret_cast<Words4*>(tiles + to_ + i * kLoadRows * kVectors * kVectorBytes) = rows_[i];
    }
    to_ ^= next_tile;
  }

 private:
  RowPlaces<kCfg.tuning.keys> places_;
  int to_;  // byte offset in LDS of the thread's first vector
  Words4 rows_[kLoads];
};

}  // namespace flashport::FLASHPORT_TARGET::attention
