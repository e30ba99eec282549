// New keys and values on their way through the ring, in kernels that append. Producers copy their rows from where the
// caller has them, as they copy those of the cache. When they have landed, compute waves turn the keys (and with the
// tile's first keys the queries) by rotary position embedding where they lie, and write them into the cache. What that
// takes besides comes with the tile's queries, by copies too: nobody waits for a load, which would come back only after
// all copies that were asked for before it.
//
// In fp32, with angle a_i of pair i at the row's position, as append_rotary (append_rotary_kernel.h):
//   (x, y) -> (x cos a_i - y sin a_i, x sin a_i + y cos a_i)
#pragma once

#include "cuda/decode/kv_pipeline.h"

namespace flashport::FLASHPORT_TARGET::decode {

inline constexpr int kUnit = 8;          // values of a row that a thread takes at a time: 16 bytes
inline constexpr int kStagedPages = 16;  // page numbers of new keys; those of later ones are loaded

template <DecodeConfig kCfg>
struct NewKeyStages {};

template <DecodeConfig kCfg>
  requires(kCfg.shape.appends)
struct NewKeyStages<kCfg> {
  // Room for seven positions in fp32 (six where tiles of 16 rows leave no more room), twice as many in 16 bits; the
  // angles of later ones are loaded.
  static constexpr int kAngleBytes = (kCfg.shape.rows == 8 ? 28 : 24) * kCfg.shape.head_dim_qk;
  struct Stage {
    alignas(16) char angles[kAngleBytes];  // cosines, then sines of each position from that of the first new key on
    int pages[kStagedPages];               // of the first new keys
  };
  Stage new_keys[KvRing<kCfg>::kQueries];  // for the sequence of each query tile
};

// Bytes of the cosines of a position, or of its sines.
FLASHPORT_DEVICE int angle_bytes(const RotaryParams& r) { return r.half * (r.dtype == DType::kFloat32 ? 4 : 2); }
FLASHPORT_DEVICE const char* angle_row(const RotaryParams& r, const void* angles, std::int64_t stride, int position) {
  return static_cast<const char*>(angles) + position * stride * (r.dtype == DType::kFloat32 ? 4 : 2);
}

// The copies of `block`'s threads, of what the query tile of segment `s` needs.
template <class Params, class Stage>
FLASHPORT_DEVICE void stage_new_keys(const AppendParamsOf<Params>& p, const Segment& s, const NewKeys& keys,
                                     const Block& block, Stage& to) {
  const RotaryParams& r = p.append.rotary;
  if (r.cos != nullptr) {
    const int bytes = angle_bytes(r), units = bytes / 16;
    const int wanted = maximum(r.queries_advance != 0 ? s.q_len : 1, keys.count);
    const int there = minimum(wanted, r.positions - keys.before);
    const int rows = minimum(there, static_cast<int>(sizeof(to.angles)) / (2 * bytes));
#pragma unroll 1
    for (int i = block.thread(); i < rows * 2 * units; i += block.threads()) {
      const int position = keys.before + i / (2 * units), unit = i % (2 * units);
      const char* from = unit < units ? angle_row(r, r.cos, r.cos_stride, position) + 16 * unit
                                      : angle_row(r, r.sin, r.sin_stride, position) + 16 * (unit - units);
      copy_async<16>(to.angles + 16 * i, from, true);
    }
  }
  if (s.pages == nullptr) return;
#pragma unroll 1
  for (int i = block.thread(); i < minimum(keys.count, kStagedPages); i += block.threads()) {
    copy_async<4>(&to.pages[i], s.pages + kv::page_coord(p.cache, s.pages, keys.before + i).page, true);
  }
}

// The row of a new key or value of the segment's kv head.
FLASHPORT_DEVICE const char* new_row(const StridedRows& rows, const Segment& s, const NewKeys& keys, int index) {
  return static_cast<const char*>(rows.data) + 2 * strided_offset(rows, s.seq, keys.row + index, s.kv_head);
}

template <MathType kMath>
FLASHPORT_DEVICE void load_unit(float (&x)[kUnit], const void* from) {
  const uint4 bits = *static_cast<const uint4*>(from);
  const unsigned words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
  for (int i = 0; i < kUnit; ++i) {
    const auto half = static_cast<std::uint16_t>(words[i / 2] >> i % 2 * 16);
    if constexpr (kMath == MathType::kBf16) {
      x[i] = to_float(__builtin_bit_cast(BFloat16, half));
    } else {
      x[i] = to_float(__builtin_bit_cast(Half, half));
    }
  }
}

template <MathType kMath>
FLASHPORT_DEVICE uint4 packed_unit(const float (&x)[kUnit]) {
  return make_uint4(pack<kMath>(x[0], x[1]), pack<kMath>(x[2], x[3]), pack<kMath>(x[4], x[5]), pack<kMath>(x[6], x[7]));
}

FLASHPORT_DEVICE void load_angles(float (&x)[kUnit], const char* from, DType dtype) {
  if (dtype == DType::kBFloat16) return load_unit<MathType::kBf16>(x, from);
  if (dtype == DType::kFloat16) return load_unit<MathType::kFp16>(x, from);
#pragma unroll
  for (int i = 0; i < kUnit; i += 4) {
    const float4 four = *reinterpret_cast<const float4*>(from + 4 * i);
    x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
  }
}

FLASHPORT_DEVICE void turn_pair(float& x, float& y, float cos, float sin) {
  const float turned = fma_rn(x, cos, -(y * sin));
  y = fma_rn(y, cos, x * sin);
  x = turned;
}

// Two units of a row. Those that are turned hold pairs 8 i to 8 i + 7 for some i, the others follow them two by two.
struct UnitPair {
  int first, second;
  bool is_turned;
};
FLASHPORT_DEVICE UnitPair unit_pair(const RotaryParams& r, bool turns, int i) {
  const int turned = turns ? r.half / kUnit : 0;
  if (i >= turned || r.is_interleaved != 0) return {2 * i, 2 * i + 1, i < turned};
  return {i, i + turned, true};
}

// What a compute wave does of it, for the segment it is at.
template <DecodeConfig kCfg>
class NewKeyTurns {
  static constexpr MathType kMath = kCfg.shape.math;
  using Tiles = KvTiles<kCfg>;
  using Stage = typename NewKeyStages<kCfg>::Stage;

 public:
  // `first_new`: the position of the sequence's first new key. `key`: the turn's first key.
  FLASHPORT_DEVICE NewKeyTurns(const DecodeParamsOf<kCfg>& p, const Block& block, const Segment& s, const Stage& stage,
                               int first_new, int key)
      : p_(p),
        block_(block),
        s_(s),
        stage_(stage),
        first_new_(first_new),
        key_(key),
        begin_(maximum(first_new, key)),
        end_(minimum(s.length, key + turn_keys(kCfg))) {}

  FLASHPORT_DEVICE bool has_new_keys() const { return begin_ < end_; }

  FLASHPORT_DEVICE void turn_query(QueryTile<kCfg>& query, int live_rows) const {
    const RotaryParams& r = p_.append.rotary;
    const int pairs = r.half / kUnit;
#pragma unroll 1
    for (int i = block_.thread(); i < live_rows * pairs; i += block_.threads()) {
      const int row = i / pairs;
      const int index = r.queries_advance != 0 ? query_row(p_, s_, kCfg.shape.rows, row).token : 0;
      if (!turns(index)) continue;
      const UnitPair at = unit_pair(r, true, i % pairs);
      void *first = query.at(row, kUnit * at.first), *second = query.at(row, kUnit * at.second);
      float x[kUnit], y[kUnit];
      load_unit<kMath>(x, first);
      load_unit<kMath>(y, second);
      turn(x, y, index, i % pairs);
      *static_cast<uint4*>(first) = packed_unit<kMath>(x);
      *static_cast<uint4*>(second) = packed_unit<kMath>(y);
    }
  }

  // Turns the turn's new keys in their tile, and writes them.
  FLASHPORT_DEVICE void append_keys(char* tile) const {
    for_each_pair(p_.cache.k, p_.head_dim_qk, true, [&](int index, int i, const UnitPair& at, bool is_pair, char* to) {
      const int row = begin_ - key_ + index;
      char *first = tile + Tiles::Keys::offset(row, 16 * at.first), *second = first;
      float x[kUnit], y[kUnit] = {};
      load_unit<kMath>(x, first);
      if (is_pair) {
        second = tile + Tiles::Keys::offset(row, 16 * at.second);
        load_unit<kMath>(y, second);
      }
      if (at.is_turned) {
        turn(x, y, begin_ - first_new_ + index, i);
        *reinterpret_cast<uint4*>(first) = packed_unit<kMath>(x);
        *reinterpret_cast<uint4*>(second) = packed_unit<kMath>(y);
      }
      write(p_.cache.k, to, at, is_pair, x, y);
    });
  }
  FLASHPORT_DEVICE void append_values(const char* tile) const {
    for_each_pair(p_.cache.v, p_.head_dim_v, false, [&](int index, int, const UnitPair& at, bool is_pair, char* to) {
      const int row = begin_ - key_ + index;
      float x[kUnit], y[kUnit] = {};
      load_unit<kMath>(x, tile + Tiles::Values::offset(row, 16 * at.first));
      if (is_pair) load_unit<kMath>(y, tile + Tiles::Values::offset(row, 16 * at.second));
      write(p_.cache.v, to, at, is_pair, x, y);
    });
  }

 private:
  // f(row of the turn's new rows, i, pair i of its units, whether both are there, where it is in the cache)
  template <class F>
  FLASHPORT_DEVICE void for_each_pair(const CacheParams& cache, int dims, bool is_key, F&& f) const {
    const int units = dims / kUnit, pairs = (units + 1) / 2;
#pragma unroll 1
    for (int i = block_.thread(); i < (end_ - begin_) * pairs; i += block_.threads()) {
      const int index = i / pairs;
      const int new_key = begin_ - first_new_ + index;
      const UnitPair at = unit_pair(p_.append.rotary, is_key && turns(new_key), i % pairs);
      f(index, i % pairs, at, at.second < units, place(cache, new_key));
    }
  }

  // No page but those of the cache is written, whatever a table says.
  FLASHPORT_DEVICE char* place(const CacheParams& cache, int index) const {
    const kv::PageCoord at = kv::page_coord(p_.cache, s_.pages, first_new_ + index);
    const int page = s_.pages == nullptr    ? s_.seq
                     : index < kStagedPages ? stage_.pages[index]
                                            : load_global(s_.pages + at.page);
    if (page < 0 || page >= p_.append.pages) return nullptr;
    return static_cast<char*>(cache.data) + kv::row_offset(cache, {page, at.offset}, s_.kv_head);
  }

  FLASHPORT_DEVICE bool turns(int index) const {
    const RotaryParams& r = p_.append.rotary;
    return r.cos != nullptr && static_cast<unsigned>(first_new_ + index) < static_cast<unsigned>(r.positions);
  }

  // Pairs 8 i to 8 i + 7 of a row at position first_new + index.
  FLASHPORT_DEVICE void turn(float (&x)[kUnit], float (&y)[kUnit], int index, int i) const {
    const RotaryParams& r = p_.append.rotary;
    const int bytes = angle_bytes(r), at = i * (r.dtype == DType::kFloat32 ? 4 : 2) * kUnit;
    const char *cosines = stage_.angles + index * 2 * bytes, *sines = cosines + bytes;
    if ((index + 1) * 2 * bytes > static_cast<int>(sizeof(stage_.angles))) {
      cosines = angle_row(r, r.cos, r.cos_stride, first_new_ + index);
      sines = angle_row(r, r.sin, r.sin_stride, first_new_ + index);
    }
    float cos[kUnit], sin[kUnit];
    load_angles(cos, cosines + at, r.dtype);
    load_angles(sin, sines + at, r.dtype);
    if (r.is_interleaved != 0) {
#pragma unroll
      for (int j = 0; j < kUnit / 2; ++j) {
        turn_pair(x[2 * j], x[2 * j + 1], cos[j], sin[j]);
        turn_pair(y[2 * j], y[2 * j + 1], cos[kUnit / 2 + j], sin[kUnit / 2 + j]);
      }
    } else {
#pragma unroll
      for (int j = 0; j < kUnit; ++j) turn_pair(x[j], y[j], cos[j], sin[j]);
    }
  }

  FLASHPORT_DEVICE static void write(const CacheParams& cache, char* to, const UnitPair& at, bool is_pair,
                                     const float (&x)[kUnit], const float (&y)[kUnit]) {
    if (to == nullptr) return;
    write_unit(cache, to + 16 * at.first, packed_unit<kMath>(x));
    if (is_pair) write_unit(cache, to + 16 * at.second, packed_unit<kMath>(y));
  }
  FLASHPORT_DEVICE static void write_unit(const CacheParams& cache, char* to, uint4 bits) {
    if (cache.copy_unit == 16) {
      *reinterpret_cast<uint4*>(to) = bits;
      return;
    }
    const unsigned words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      reinterpret_cast<std::uint16_t*>(to)[i] = static_cast<std::uint16_t>(words[i / 2] >> i % 2 * 16);
    }
  }

  const DecodeParamsOf<kCfg>& p_;
  const Block& block_;
  const Segment& s_;
  const Stage& stage_;
  const int first_new_, key_, begin_, end_;  // [begin, end): the turn's new keys
};

}  // namespace flashport::FLASHPORT_TARGET::decode
