// The rows of a producer wave as they are stored, on their way through shared memory (segment_producer.h): a queue of
// tiles of 16 rows of one side, keys or values, each row with its factors behind it. A tile takes as many bytes as the
// longest of its rows asks for.
#pragma once

#include "common/device/decode/segments.h"
#include "common/device/kv/widen.h"
#include "cuda/arch/mma.h"
#include "cuda/decode/kv_pipeline.h"

namespace flashport::FLASHPORT_TARGET::decode {

// What a wave has in shared memory.
template <DecodeConfig kCfg>
struct StoredRows {
  static constexpr int kRows = turn_keys(kCfg) / kCfg.tuning.producer_waves;
  static constexpr int kMostTiles = kCfg.shape.head_dim_qk > 256 ? 2 : 8;
  static constexpr int kLongestRow = (2 * kCfg.shape.head_dim_qk + 16) + 32;  // of a 16-bit type, with its factor
  static constexpr int kBytes = kCfg.shape.head_dim_qk > 256   ? kRows * kLongestRow
                                : kCfg.shape.head_dim_qk > 128 ? 24 * 1024
                                                               : 15 * 1024;
  static_assert(kBytes >= kRows * kLongestRow && kBytes < 1 << 16);

  // A tile's first byte, and how many lie between a row and its factors, and a row and the next.
  struct Tile {
    std::uint16_t begin, row_pitch, pitch;
  };
  // A row's segment, -1 if there is no such key, and by how many bytes it and its factors begin inside a unit of 16.
  struct Row {
    std::int8_t segment;
    std::uint8_t shift, factor_shift;
  };
  alignas(16) char bytes[kBytes + 16];  // what follows the last row may be read
  Tile tiles[kMostTiles];
  Row rows[kMostTiles][kRows];

  class Wave;
};

// The wave's own view of it.
template <DecodeConfig kCfg>
class StoredRows<kCfg>::Wave {
 public:
  FLASHPORT_DEVICE explicit Wave(StoredRows& shared) : s_(shared) {}

  FLASHPORT_DEVICE bool has_number() const { return count_ < kMostTiles; }

  // Lanes i and 16 + i find the bytes of row i of keys and of values.
  FLASHPORT_DEVICE void find(const MixedDecodeParams& p, int segment, kv::TokenCoord place, int head, int lane) {
    const bool is_value = lane >= kRows;
    row_ = {};
    factors_ = {};
    segment_ = segment;
    if (segment >= 0) {
      const CacheSegment& s = p.segments[segment];
      const CacheParams& cache = is_value ? s.cache.v : s.cache.k;
      const KeyScales& scales = is_value ? s.v_scale : s.k_scale;
      row_ = source_of(cache_row(cache, place, head), cache.row_bytes);
      if (scales.data != nullptr) {
        const int dims = is_value ? p.head_dim_v : p.head_dim_qk;
        const int size = factor_bytes(scales), groups = scales.dims_per_scale == 0 ? 1 : dims / scales.dims_per_scale;
        factors_ =
            source_of(static_cast<const char*>(scales.data) + scale_element(scales, place, head) * size, groups * size);
      }
    }
    const unsigned side = is_value ? 0xffff0000u : 0x0000ffffu;
    const auto most_units = [&](const Source& source) {
      return static_cast<int>(__reduce_max_sync(side, static_cast<unsigned>(source.end + 15) / 16));
    };
    const int both = most_units(row_) | most_units(factors_) << 16;
    key_units_ = __shfl_sync(~0u, both, 0);
    value_units_ = __shfl_sync(~0u, both, kRows);
  }

  // Asks for the rows of keys or values that were found, as a group of copies; false if there is no room for them yet.
  FLASHPORT_DEVICE bool ask(const MixedDecodeParams& p, bool is_value, int lane) {
    const int both = is_value ? value_units_ : key_units_;
    const int units = both & 0xffff, factor_units = both >> 16;
    // An odd number of units: rows then begin in different banks.
    const int pitch = 16 * ((units + factor_units) | 1);
    const int begin = find_room(kRows * pitch);
    if (begin < 0) return false;
    const int number = (oldest_ + count_) % kMostTiles;
    __syncwarp();  // what lay there before has been read
    if (is_value == (lane >= kRows)) {
      s_.rows[number][lane % kRows] = {static_cast<std::int8_t>(segment_), static_cast<std::uint8_t>(row_.shift),
                                       static_cast<std::uint8_t>(factors_.shift)};
    }
    if (lane == 0) {
      s_.tiles[number] = {static_cast<std::uint16_t>(begin), static_cast<std::uint16_t>(16 * units),
                          static_cast<std::uint16_t>(pitch)};
    }
    const int finder = lane % kRows + (is_value ? kRows : 0);
    char* to = s_.bytes + (begin + lane % kRows * pitch);
    copy(row_.of_lane(finder), to, lane);
    if (factor_units > 0) {
      if (has_separate_factors(p, is_value)) {
        if (is_value == (lane >= kRows)) gather_factors(p, is_value, to + 16 * units);
      } else {
        copy(factors_.of_lane(finder), to + 16 * units, lane);
      }
    }
    commit_copies();
    ++count_;
    return true;
  }

  // Waits until the oldest tile has come.
  FLASHPORT_DEVICE void await_oldest() const {
    switch (count_) {
      case 1: await_copy_groups<0>(); break;
      case 2: await_copy_groups<1>(); break;
      case 3: await_copy_groups<2>(); break;
      case 4: await_copy_groups<3>(); break;
      case 5: await_copy_groups<4>(); break;
      case 6: await_copy_groups<5>(); break;
      case 7: await_copy_groups<6>(); break;
      default: await_copy_groups<7>(); break;
    }
  }
  FLASHPORT_DEVICE void drop_oldest() {
    oldest_ = (oldest_ + 1) % kMostTiles;
    --count_;
  }

  FLASHPORT_DEVICE int segment_of(int row) const { return s_.rows[oldest_][row].segment; }

  // The bytes of 32 values of a row, which begin at an even one. Words are asked for at multiples of 4 from byte
  // kAnchor on, so that all come from one address; one made of integers would no longer be known as one of shared
  // memory.
  template <int kAnchor>
  struct Block {
    const char *bytes, *words;  // words: a multiple of 4
    unsigned shift;             // in bits, of byte kAnchor there
    FLASHPORT_DEVICE unsigned half(int byte) const { return *reinterpret_cast<const std::uint16_t*>(bytes + byte); }
    FLASHPORT_DEVICE unsigned word(int byte) const {
      const auto* at = reinterpret_cast<const unsigned*>(words + (byte - kAnchor));
      return __funnelshift_r(at[0], at[1], shift);
    }
  };
  // Of the oldest tile, from value `dim` on, a multiple of 32.
  template <KvFormat kFormat>
  FLASHPORT_DEVICE auto block(int row, int dim) const {
    constexpr KvFormatTrait kTrait = kv_format_trait(kFormat);
    constexpr int kAnchor = kTrait.scale_bytes % 4, kBytes = 32 / kTrait.block_values * kTrait.block_bytes;
    const Tile tile = s_.tiles[oldest_];
    const int first = tile.begin + row * tile.pitch + s_.rows[oldest_][row].shift + dim / 32 * kBytes;
    return Block<kAnchor>{s_.bytes + first, s_.bytes + ((first + kAnchor) & ~3),
                          static_cast<unsigned>(first + kAnchor) * 8 & 16};
  }
  FLASHPORT_DEVICE float factor(int row, const KeyScales& scales, int dim) const {
    const Tile tile = s_.tiles[oldest_];
    const int group = scales.dims_per_scale == 0 ? 0 : dim / scales.dims_per_scale;
    const char* factors =
        s_.bytes + (tile.begin + row * tile.pitch + tile.row_pitch + s_.rows[oldest_][row].factor_shift);
    return scales.dtype == DType::kFloat16 ? to_float(reinterpret_cast<const Half*>(factors)[group])
                                           : reinterpret_cast<const float*>(factors)[group];
  }

 private:
  FLASHPORT_DEVICE static int factor_bytes(const KeyScales& scales) { return scales.dtype == DType::kFloat16 ? 2 : 4; }
  // Where bytes lie: `shift` bytes into a unit of 16 and the units after it, up to byte `end` from that unit on.
  struct Source {
    const char* units;
    int shift, end;
    FLASHPORT_DEVICE Source of_lane(int lane) const {
      const auto address = __shfl_sync(~0u, reinterpret_cast<unsigned long long>(units), lane);
      return {reinterpret_cast<const char*>(address), 0, __shfl_sync(~0u, end, lane)};
    }
  };
  FLASHPORT_DEVICE static Source source_of(const char* data, int bytes) {
    const int shift = static_cast<int>(reinterpret_cast<std::uintptr_t>(data) % 16);
    return {data - shift, shift, shift + bytes};
  }

  // Where the next tile's bytes go: after those of the one before, or from the beginning on; -1: there is no room yet.
  FLASHPORT_DEVICE int find_room(int bytes) {
    int begin = end_;
    if (count_ == 0) {
      begin = 0;
    } else {
      const int oldest = s_.tiles[oldest_].begin;
      if (end_ <= oldest) {
        if (end_ + bytes > oldest) return -1;
      } else if (end_ + bytes > kBytes) {
        if (bytes > oldest) return -1;
        begin = 0;
      }
    }
    end_ = begin + bytes;
    return begin;
  }

  // Lanes i and 16 + i copy the units of row i in turn. Nothing after a row is read; what is read before it lies in the
  // same 16 bytes.
  FLASHPORT_DEVICE static void copy(const Source& source, char* to, int lane) {
    const int whole = source.end / 16, first = lane / kRows;
    const char* from = source.units + 16 * first;
    char* at = to + 16 * first;
#pragma unroll 4
    for (int unit = first; unit < whole; unit += 2, from += 32, at += 32) copy_async_first(at, from, 16);
    if (source.end % 16 > 0 && whole % 2 == first)
      copy_async_first(to + 16 * whole, source.units + 16 * whole, source.end % 16);
  }

  // Factors of a row that do not lie side by side, in some segment.
  FLASHPORT_DEVICE static bool has_separate_factors(const MixedDecodeParams& p, bool is_value) {
    bool separate = false;
    for (int i = 0; i < p.segment_count; ++i) {
      const KeyScales& scales = is_value ? p.segments[i].v_scale : p.segments[i].k_scale;
      separate |= scales.data != nullptr && scales.dims_per_scale > 0 && scales.stride_group != 1;
    }
    return separate;
  }
  FLASHPORT_DEVICE void gather_factors(const MixedDecodeParams& p, bool is_value, char* to) {
    if (segment_ < 0) return;
    const KeyScales& scales = is_value ? p.segments[segment_].v_scale : p.segments[segment_].k_scale;
    if (scales.data == nullptr) return;
    const int size = factor_bytes(scales);
#pragma unroll 1
    for (int i = 0; i < (factors_.end - factors_.shift) / size; ++i) {
      const char* from = factors_.units + factors_.shift + i * scales.stride_group * size;
      char* its = to + factors_.shift + i * size;
      if (size == 2) {
        *reinterpret_cast<std::uint16_t*>(its) = *reinterpret_cast<const std::uint16_t*>(from);
      } else {
        *reinterpret_cast<unsigned*>(its) = *reinterpret_cast<const unsigned*>(from);
      }
    }
  }

  StoredRows& s_;
  Source row_{}, factors_{};  // that the lane has found
  int segment_ = -1;
  int key_units_ = 0, value_units_ = 0;   // of 16 bytes, of the longest row; of factors in the upper half
  int oldest_ = 0, count_ = 0, end_ = 0;  // the oldest tile's number; tiles in the queue; after the last one's bytes
};

}  // namespace flashport::FLASHPORT_TARGET::decode
