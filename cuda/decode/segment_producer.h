// The waves of a block that bring rows of any formats (common/device/decode/segments.h) into the ring of kv_pipeline.h,
// widened to the math type and multiplied by their factors: the waves that compute see a 16-bit cache.
//
// Each producer wave has the same rows of every tile. Their bytes come as they are stored, with their factors, by
// cp.async into memory of the wave's own, several tiles ahead; when a tile's turn comes, the wave widens its rows into
// the tile, four values a lane, so that all lanes work on one row of one format where a row has 128 values or more.
#pragma once

#include "common/device/kv/widen.h"
#include "cuda/decode/kv_pipeline.h"

namespace flashport::FLASHPORT_TARGET::decode {

// Of each producer wave: the bytes of its rows, of as many tiles as there is room for.
template <DecodeConfig kCfg>
struct StoredRows {
  static constexpr int kWaves = kCfg.tuning.producer_waves;
  static constexpr int kRows = turn_keys(kCfg) / kWaves;
  static constexpr int kMostTiles = kCfg.shape.head_dim_qk > 256 ? 2 : 8;
  static constexpr int kLongestRow = (2 * kCfg.shape.head_dim_qk + 16) + 32;  // of a 16-bit type, with its factor
  static constexpr int kBytes = kCfg.shape.head_dim_qk > 256 ? kRows * kLongestRow : 12 * 1024;
  static_assert(kRows < kWaveSize && kBytes >= kRows * kLongestRow);

  // A tile's first byte, and how many lie between a row and its factors, and a row and the next.
  struct Tile {
    std::uint16_t begin, row_pitch, pitch;
  };
  // A row's segment, -1 if there is no such key, and by how many bytes it and its factors begin inside a unit of 16.
  struct Row {
    std::int8_t segment;
    std::uint8_t shift, factor_shift;
  };
  struct Source {
    const char *row, *factors;
    std::uint16_t bytes, factor_bytes;
  };

  alignas(16) char bytes[kWaves][kBytes + 16];  // what follows the last row may be read
  Source sources[kWaves][kRows];                // of the tile that is being asked for
  Tile tiles[kWaves][kMostTiles];
  Row rows[kWaves][kMostTiles][kRows];
};

template <DecodeConfig kCfg>
struct SegmentStages {};
template <DecodeConfig kCfg>
  requires(reads_segments(kCfg.shape))
struct SegmentStages<kCfg> {
  StoredRows<kCfg> stored;
};

template <DecodeConfig kCfg, class Shared>
class SegmentProducer {
  using Rows = StoredRows<kCfg>;
  using Ring = KvRing<kCfg>;
  using Layout = typename KvTiles<kCfg>::Keys;
  static_assert(kCfg.shape.head_dim_qk == kCfg.shape.head_dim_v, "tiles of keys and of values are alike");
  static constexpr int kRows = Rows::kRows;
  static constexpr int kFours = Layout::kHeadBytes / 8;  // of a row; lanes side by side have one after the other
  static_assert(kFours % kWaveSize == 0);
  static constexpr MathType kMath = kCfg.shape.math;

 public:
  FLASHPORT_DEVICE SegmentProducer(const Block& block, Shared& shared)
      : block_(block), ring_(shared.ring), stored_(shared.stored), lane_(block.lane()), wave_(block.wave()) {}

  FLASHPORT_DEVICE void run(const MixedDecodeParams& p, const Range& range) {
    LeafCursor now(range), ahead(range);
    if (now.done()) return;
    look_up(p, ahead);
    bool is_key = true;
#pragma unroll 1
    while (!now.done()) {
      ask_for_all_that_fits(p, ahead);
      if (is_key && now.at_segment_start()) bring_query(p, now.segment);
      await_oldest();
      widen_tile(p, is_key);
      if (!is_key) now.next(p, kCfg.tuning.leaves);
      is_key = !is_key;
    }
  }

 private:
  FLASHPORT_DEVICE void bring_query(const MixedDecodeParams& p, const Segment& s) {
    mbarrier_wait(&ring_.query_free[query_.stage], query_.phase ^ 1);
    copy_query<kCfg>(p, s, block_, ring_.queries[query_.stage]);
    query_.next();
    await_copies();
  }

  // Lane i looks up row i of the next tile of keys, which is that of values, too.
  FLASHPORT_DEVICE void look_up(const MixedDecodeParams& p, const LeafCursor& ahead) {
    if (ahead.done()) return;
    const Segment& s = ahead.segment;
    if (s.seq != seq_) {
      seq_ = s.seq;
      starts_ = segment_starts(p, seq_);
    }
    const int key = ahead.key() + wave_ * kRows + lane_ % kRows;
    segment_ = -1;
    if (key < s.key_low || key >= s.key_high) return;
    const SegmentKey at = segment_key(starts_, key);
    segment_ = at.segment;
    place_ = segment_coord(p.segments[segment_], seq_, at.key);
  }

  FLASHPORT_DEVICE void ask_for_all_that_fits(const MixedDecodeParams& p, LeafCursor& ahead) {
#pragma unroll 1
    while (!ahead.done() && in_flight_ < Rows::kMostTiles && ask(p, ahead.segment.kv_head)) {
      ++in_flight_;
      if (asks_values_) {
        ahead.next(p, kCfg.tuning.leaves);
        look_up(p, ahead);
      }
      asks_values_ = !asks_values_;
    }
  }

  // Asks for the rows of the next tile, of keys and values in turn, as a group of copies; if there is room for them.
  FLASHPORT_DEVICE bool ask(const MixedDecodeParams& p, int head) {
    const int number = (widened_ + in_flight_) % Rows::kMostTiles;
    __syncwarp();  // what lay there before has been read
    typename Rows::Source source{};
    typename Rows::Row row{static_cast<std::int8_t>(segment_), 0, 0};
    int units = 0, factor_units = 0;
    if (segment_ >= 0) {
      const CacheSegment& s = p.segments[segment_];
      const CacheParams& cache = asks_values_ ? s.cache.v : s.cache.k;
      const KeyScales& scales = asks_values_ ? s.v_scale : s.k_scale;
      source.row = cache_row(cache, place_, head);
      source.bytes = static_cast<std::uint16_t>(cache.row_bytes);
      row.shift = reinterpret_cast<std::uintptr_t>(source.row) % 16;
      units = (row.shift + cache.row_bytes + 15) / 16;
      if (scales.data != nullptr) {
        const int size = factor_bytes(scales);
        const int dims = asks_values_ ? p.head_dim_v : p.head_dim_qk;
        const int count = scales.dims_per_scale == 0 ? 1 : dims / scales.dims_per_scale;
        source.factors = static_cast<const char*>(scales.data) + scale_element(scales, place_, head) * size;
        source.factor_bytes = static_cast<std::uint16_t>(count * size);
        row.factor_shift = reinterpret_cast<std::uintptr_t>(source.factors) % 16;
        factor_units = (row.factor_shift + source.factor_bytes + 15) / 16;
      }
    }
    units = __reduce_max_sync(~0u, units);
    factor_units = __reduce_max_sync(~0u, factor_units);
    const int begin = find_room(kRows * 16 * (units + factor_units));
    if (begin < 0) return false;
    if (lane_ < kRows) {
      stored_.sources[wave_][lane_] = source;
      stored_.rows[wave_][number][lane_] = row;
    }
    const typename Rows::Tile tile{static_cast<std::uint16_t>(begin), static_cast<std::uint16_t>(16 * units),
                                   static_cast<std::uint16_t>(16 * (units + factor_units))};
    if (lane_ == 0) stored_.tiles[wave_][number] = tile;
    __syncwarp();
    char* to = stored_.bytes[wave_] + begin;
    copy_units(units, tile.pitch, to, [](const auto& from) { return Bytes{from.row, from.bytes}; });
    if (factor_units > 0) {
      if (has_separate_factors(p)) {
        gather_factors(p, to + lane_ * tile.pitch + tile.row_pitch);
      } else {
        copy_units(factor_units, tile.pitch, to + tile.row_pitch,
                   [](const auto& from) { return Bytes{from.factors, from.factor_bytes}; });
      }
    }
    commit_copies();
    return true;
  }

  // Where the next tile's bytes go: after those of the one before, or from the beginning on; -1: there is no room yet.
  FLASHPORT_DEVICE int find_room(int bytes) {
    int begin = end_;
    if (in_flight_ == 0) {
      begin = 0;
    } else {
      const int oldest = stored_.tiles[wave_][widened_].begin;
      if (end_ <= oldest) {
        if (end_ + bytes > oldest) return -1;
      } else if (end_ + bytes > Rows::kBytes) {
        if (bytes > oldest) return -1;
        begin = 0;
      }
    }
    end_ = begin + bytes;
    return begin;
  }

  FLASHPORT_DEVICE static int factor_bytes(const KeyScales& scales) { return scales.dtype == DType::kFloat16 ? 2 : 4; }
  // Whether the factors of a row do not lie side by side, in some segment.
  FLASHPORT_DEVICE bool has_separate_factors(const MixedDecodeParams& p) const {
    bool separate = false;
    for (int i = 0; i < p.segment_count; ++i) {
      const KeyScales& scales = asks_values_ ? p.segments[i].v_scale : p.segments[i].k_scale;
      separate |= scales.data != nullptr && scales.dims_per_scale > 0 && scales.stride_group != 1;
    }
    return separate;
  }
  FLASHPORT_DEVICE void gather_factors(const MixedDecodeParams& p, char* to) {
    if (lane_ >= kRows || segment_ < 0) return;
    const typename Rows::Source& source = stored_.sources[wave_][lane_];
    const KeyScales& scales = asks_values_ ? p.segments[segment_].v_scale : p.segments[segment_].k_scale;
    const int size = factor_bytes(scales);
    to += reinterpret_cast<std::uintptr_t>(source.factors) % 16;
#pragma unroll 1
    for (int i = 0; i < source.factor_bytes / size; ++i) {
      const char* from = source.factors + i * scales.stride_group * size;
      if (size == 2) {
        reinterpret_cast<std::uint16_t*>(to)[i] = *reinterpret_cast<const std::uint16_t*>(from);
      } else {
        reinterpret_cast<unsigned*>(to)[i] = *reinterpret_cast<const unsigned*>(from);
      }
    }
  }

  // Copies what bytes_of(source) says of each row, `units` of 16 bytes, from the one that it begins in. Nothing after
  // the row is read; what is read before it lies in the same 16 bytes.
  struct Bytes {
    const char* data;
    int count;
  };
  template <class F>
  FLASHPORT_DEVICE void copy_units(int units, int pitch, char* to, const F& bytes_of) {
    const unsigned inverse = 0x10000u / static_cast<unsigned>(maximum(units, 1)) + 1;
#pragma unroll 2
    for (int i = lane_; i < kRows * units; i += kWaveSize) {
      const int row = static_cast<int>(i * inverse >> 16), unit = i - row * units;
      const Bytes from = bytes_of(stored_.sources[wave_][row]);
      const int shift = static_cast<int>(reinterpret_cast<std::uintptr_t>(from.data) % 16);
      const int left = shift + from.count - 16 * unit;
      if (from.count == 0 || left <= 0) continue;
      copy_async_first(to + row * pitch + 16 * unit, from.data - shift + 16 * unit, minimum(left, 16));
    }
  }

  // The oldest of the tiles that were asked for has come.
  FLASHPORT_DEVICE void await_oldest() const {
    switch (in_flight_) {
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

  // A row's bytes in shared memory, from an even one on. An address of integers would no longer be one of shared
  // memory.
  struct StoredRow {
    const char* bytes;  // a multiple of 4
    int first;
    FLASHPORT_DEVICE unsigned half(int byte) const {
      return *reinterpret_cast<const std::uint16_t*>(bytes + (first + byte));
    }
    FLASHPORT_DEVICE unsigned word(int byte) const {
      const int at = first + byte;
      const auto* words = reinterpret_cast<const unsigned*>(bytes + (at & ~3));
      return __funnelshift_r(words[0], words[1], static_cast<unsigned>(at) * 8 & 16);
    }
  };

  // Widens the wave's rows of the oldest tile into the ring.
  FLASHPORT_DEVICE void widen_tile(const MixedDecodeParams& p, bool is_key) {
    __syncwarp();  // the copies of all lanes
    const int dims = is_key ? p.head_dim_qk : p.head_dim_v;
    const int segment = lane_ < kRows ? stored_.rows[wave_][widened_][lane_].segment : kNoRow;
    mbarrier_wait(&ring_.free[place_of_tile_.stage], place_of_tile_.phase ^ 1);
    char* tile = ring_.tiles[place_of_tile_.stage];
#pragma unroll 1
    for (int row = 0; row < kRows;) {  // runs of rows of one segment
      const int its = __shfl_sync(~0u, segment, row);
      const unsigned others = __ballot_sync(~0u, segment != its) & (~0u << row);
      const int end = others == 0 ? kRows : __ffs(static_cast<int>(others)) - 1;
      if (its < 0) {
        clear_rows(tile, row, end);
      } else {
        const CacheSegment& s = p.segments[its];
        const KeyScales& scales = is_key ? s.k_scale : s.v_scale;
        kv::with_format(is_key ? s.k_format : s.v_format, [&](auto constant) FLASHPORT_INLINE {
          constexpr KvFormat kFormat = constant;
          if (scales.data == nullptr) {
            widen_rows<kFormat, false>(tile, row, end, dims, scales);
          } else {
            widen_rows<kFormat, true>(tile, row, end, dims, scales);
          }
        });
      }
      row = end;
    }
    mbarrier_arrive_wave(&ring_.ready[place_of_tile_.stage]);
    place_of_tile_.next();
    widened_ = (widened_ + 1) % Rows::kMostTiles;
    --in_flight_;
  }

  // Rows [begin, end), several at once: their loads come before the stores of any. Values that rows do not have are
  // zeros.
  template <KvFormat kFormat, bool kHasScale>
  FLASHPORT_DEVICE void widen_rows(char* tile, int begin, int end, int dims, const KeyScales& scales) {
    constexpr int kPasses = kFours / kWaveSize, kRowsAtOnce = kPasses >= 4 ? 1 : 4 / kPasses;
    const typename Rows::Tile from = stored_.tiles[wave_][widened_];
    const auto& rows = stored_.rows[wave_][widened_];
    const char* bytes = stored_.bytes[wave_];
    const bool is_half = scales.dtype == DType::kFloat16;
    int first[kPasses];
    [[maybe_unused]] int factor_byte[kPasses];
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int dim = 4 * (lane_ + pass * kWaveSize);
      first[pass] = dim < dims ? dim : 0;
      if constexpr (kHasScale) {
        const int group = scales.dims_per_scale == 0 ? 0 : first[pass] / scales.dims_per_scale;
        factor_byte[pass] = from.begin + from.row_pitch + group * (is_half ? 2 : 4);
      }
    }
#pragma unroll 1
    for (int row = begin; row < end; row += kRowsAtOnce) {
      Words2 x[kRowsAtOnce][kPasses];
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i) {
        const int its = minimum(row + i, end - 1);
        const int offset = its * from.pitch;
        const StoredRow stored{bytes, from.begin + offset + rows[its].shift};
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) {
          float scale = 1.0f;
          if constexpr (kHasScale) {
            const char* factor = bytes + (factor_byte[pass] + offset + rows[its].factor_shift);
            scale =
                is_half ? to_float(*reinterpret_cast<const Half*>(factor)) : *reinterpret_cast<const float*>(factor);
          }
          x[i][pass] = kv::load_four<kMath, kFormat, kHasScale>(stored, first[pass], scale);
        }
      }
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i) {
        if (row + i >= end) continue;
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) {
          const int dim = 4 * (lane_ + pass * kWaveSize);
          *four_of(tile, row + i, dim) = dim < dims ? x[i][pass] : Words2{0, 0};
        }
      }
    }
  }
  FLASHPORT_DEVICE void clear_rows(char* tile, int begin, int end) {
#pragma unroll 1
    for (int row = begin; row < end; ++row) {
      for (int four = lane_; four < kFours; four += kWaveSize) *four_of(tile, row, 4 * four) = Words2{0, 0};
    }
  }
  FLASHPORT_DEVICE Words2* four_of(char* tile, int row, int dim) {
    return reinterpret_cast<Words2*>(tile + Layout::offset(wave_ * kRows + row, 2 * dim));
  }

  static constexpr int kNoRow = -2;

  const Block& block_;
  Ring& ring_;
  Rows& stored_;
  const int lane_, wave_;
  int widened_ = 0, in_flight_ = 0, end_ = 0;  // the number of the oldest tile; tiles asked for; after their last byte
  bool asks_values_ = false;
  int seq_ = -1, segment_ = -1;  // of the row that the lane has looked up
  SegmentStarts starts_;
  kv::TokenCoord place_{};
  PipelineState<Ring::kTiles> place_of_tile_;
  PipelineState<Ring::kQueries> query_;
};

}  // namespace flashport::FLASHPORT_TARGET::decode
