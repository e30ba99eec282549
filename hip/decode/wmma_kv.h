// K and V on their way from device memory to WMMA operands, without a stop in shared memory: a wave loads what its own
// lanes multiply, and nothing twice but through the two halves of a wave, which hit the cache.
//
//   KeyUnit<format>   32 dims of the key row of a lane, as stored; operand(step) is the A operand of 16 of them
//   ValueUnit         16 keys and kLaneCols neighbouring columns a lane; a half of the wave holds one key of each pair.
//                     The halves exchange words, and v_perm_b32 zips them: operand(j) is the A operand of column j of
//                     every lane, keys as k
//
// Scales come with what they scale: of blocks, or of groups of 8 values, which lie in rows of their own.
//
// The keys of a leaf are multiplied in the order of key_at (lane_maps.h): the keys of a pair lie 16 apart, so that the
// lane that looked a value row up and the lanes that load it are in one half.
//
// Rows that no token owns are read from a row of zeros, as are dims past the end of a key row (the query is zero there,
// but 0 * NaN is not). Columns past the end of a value row repeat its first ones: no one looks at them.
// Codes are widened to fp16 in the operand: exactly for fp8, rounded once (a code times its scale) for blocks and
// groups.
#pragma once

#include "common/device/decode/config.h"
#include "common/device/decode/schedule.h"
#include "common/device/decode/segments.h"
#include "hip/arch/wmma.h"
#include "hip/kv/widen.h"

namespace flashport::FLASHPORT_TARGET::decode {

// Selectors of v_perm_b32(second, first): byte `byte` of both words, or two neighbouring bytes of the first, in the
// high or low bytes of the two halves, zeros (0x0c) beside them; or one half of both words.
constexpr unsigned zip_bytes_high(int byte) { return (4u + byte) << 24 | 0x0c0000u | unsigned(byte) << 8 | 0x0cu; }
constexpr unsigned zip_bytes_low(int byte) { return 0x0c000000u | (4u + byte) << 16 | 0x0c00u | unsigned(byte); }
constexpr unsigned pair_bytes_high(int byte) {
  return unsigned(byte + 1) << 24 | 0x0c0000u | unsigned(byte) << 8 | 0x0cu;
}
constexpr unsigned pair_bytes_low(int byte) {
  return 0x0c000000u | unsigned(byte + 1) << 16 | 0x0c00u | unsigned(byte);
}
constexpr unsigned zip_halves(int half) { return half == 0 ? 0x05040100u : 0x07060302u; }

using Half2 = Half __attribute__((ext_vector_type(2)));
using UShort2 = unsigned short __attribute__((ext_vector_type(2)));

// Two e4m3 codes, each in the high byte of a half, as fp16. The code's exponent and mantissa are those of a half that
// is 2^8 too small; the code 0x7f alone is raised to a NaN first.
FLASHPORT_DEVICE unsigned widen_fp8(unsigned codes) {
  const UShort2 magnitude = __builtin_bit_cast(UShort2, codes >> 1 & 0x3f803f80u);
  const UShort2 is_nan = __builtin_elementwise_sub_sat(magnitude, UShort2(0x3f00));  // 0x80 or 0
  const unsigned raised = __builtin_bit_cast(unsigned, static_cast<UShort2>(is_nan * UShort2(0x80) + magnitude));
  const Half2 small = __builtin_bit_cast(Half2, raised | (codes & 0x80008000u));
  return __builtin_bit_cast(unsigned, small* Half2(256.0f));
}

// Two kv::code_bytes(), each in the low byte of a half, times the scales: 0x6400 is 1024, in whose neighbourhood fp16
// counts in ones.
template <KvFormat kFormat>
FLASHPORT_DEVICE unsigned widen_codes(unsigned bytes, unsigned scales) {
  static_assert(kv::is_of_whole_numbers(kFormat));
  const Half2 numbers = __builtin_bit_cast(Half2, bytes | 0x64006400u) - Half2(1024.0f + kv::kMiddleCode<kFormat>);
  return __builtin_bit_cast(unsigned, numbers* __builtin_bit_cast(Half2, scales));
}

template <KvFormat kFormat, bool kFactored = false>
struct KeyUnit {
  static constexpr int kDims = 32;
  static constexpr int kBytes = kv_row_bytes(kFormat, kDims);
  static constexpr bool kScaled = kv::has_scales(kFormat);
  static constexpr int kWords = kDims * kv::code_bits(kFormat) / 32;
  static constexpr int kScales = kFactored ? kDims / kFactoredValues / 2 : kScaled ? 1 : 0;
  static constexpr int kRegisters = kWords + kScales;
  unsigned words[kWords];
  unsigned scales[kScales > 0 ? kScales : 1];  // of the block, in both halves, or of two groups each

  FLASHPORT_DEVICE void load(GlobalBytes row, GlobalBytes factors, int unit, int row_bytes) {
    if constexpr (kFactored) load_words(scales, factors + kv::factor_byte(unit * kDims));
    if constexpr (kScaled) {
      const GlobalBytes at = (unit * kBytes < row_bytes ? row : zero_row()) + unit * kBytes;
      scales[0] = load_half_word(at) * 0x10001u;
#pragma unroll
      for (int i = 0; i < kWords / 4; ++i) load_quad(i, at + 2 + 16 * i);
    } else if (kv::code_bits(kFormat) == 8 && !kFactored && row_bytes % 16 != 0) {
#pragma unroll
      for (int i = 0; i < kWords / 2; ++i) {
        const int byte = unit * kBytes + 8 * i;
        const auto two = load_words<2>((byte < row_bytes ? row : zero_row()) + byte);
        words[2 * i] = two[0];
        words[2 * i + 1] = two[1];
      }
    } else {
#pragma unroll
      for (int i = 0; i < kWords / 4; ++i) {
        const int byte = unit * kBytes + 16 * i;
        load_quad(i, (byte < row_bytes ? row : zero_row()) + byte);
      }
    }
  }

  // Dims 16 step .. 16 step + 15 of the unit.
  FLASHPORT_DEVICE Words8 operand(int step) const {
    Words8 a;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if constexpr (!kv::is_widened(kFormat)) {
        a[i] = words[8 * step + i];
      } else {
        const unsigned stored = words[(4 * step + i / 2) % kWords];
        const unsigned four = kv::code_bytes<kFormat>(stored, kv::element_shift<kFormat>(16 * step));
        const int byte = i % 2 * 2;
        if constexpr (kFactored) {
          const unsigned two = scales[step];
          const unsigned scale = 2 * i < kFactoredValues ? low_halves(two, two) : high_halves(two, two);
          a[i] = widen_codes<kFormat>(__builtin_amdgcn_perm(0, four, pair_bytes_low(byte)), scale);
        } else if constexpr (kScaled) {
          a[i] = widen_codes<kFormat>(__builtin_amdgcn_perm(0, four, pair_bytes_low(byte)), scales[0]);
        } else {
          static_assert(kFormat == KvFormat::kFp8E4M3);
          a[i] = widen_fp8(__builtin_amdgcn_perm(0, four, pair_bytes_high(byte)));
        }
      }
    }
    return a;
  }

 private:
  FLASHPORT_DEVICE void load_quad(int i, GlobalBytes at) {
    const auto four = load_words<4>(at);
#pragma unroll
    for (int k = 0; k < 4; ++k) words[4 * i + k] = four[k];
  }
};

template <KvFormat kFormat, int kLaneCols, bool kFactored = false>
struct ValueUnit {
  static constexpr int kKeys = 16;
  static constexpr int kPairs = kKeys / 2;
  static constexpr int kWords = kv::is_widened(kFormat) ? 1 : kLaneCols / 2;
  static constexpr bool kScaled = kFactored || kv::has_scales(kFormat);
  static constexpr int kRegisters = kPairs * (kWords + (kScaled ? 1 : 0));
  static_assert(kLaneCols == 2 || kLaneCols == 4);

  static constexpr int kWordCols = kv::is_widened(kFormat) ? kLaneCols : 2;  // columns of a word

  unsigned words[kPairs][kWords];
  unsigned scales[kPairs];  // of blocks or groups

  // Where a lane's columns begin in a row.
  FLASHPORT_DEVICE static int lane_offset(int col, int row_bytes) {
    const int byte = kv::element_byte<kFormat>(col);
    return byte < row_bytes ? byte : kv::element_byte<kFormat>(kv::has_scales(kFormat) ? col % 32 : 0);
  }

  // row(pair): the lane's row of a pair of keys, factors(pair): of their factors. col: the lane's first column.
  template <class Row, class FactorRow>
  FLASHPORT_DEVICE void load(const Row& row, const FactorRow& factors, int col, int row_bytes) {
    const int offset = lane_offset(col, row_bytes);
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      const GlobalBytes at = row(pair) + offset;
      if constexpr (kv::is_widened(kFormat) && kLaneCols == 2) {
        words[pair][0] = load_half_word(at);
      } else {
        load_words(words[pair], at);
      }
      if constexpr (kFactored) {
        scales[pair] = load_half_word(factors(pair) + kv::factor_byte(col));
      } else if constexpr (kScaled) {
        scales[pair] = load_half_word(at - kv::element_byte<kFormat>(col % 32));
      }
    }
  }

  // One word of each row of this half and of the other, codes as a byte each.
  struct Both {
    unsigned own[kPairs], other[kPairs];
    unsigned scales[kPairs];  // of both halves' rows
  };
  // shift: of the lane's columns in their bytes. swap: 0x04040404 in the upper half, where the other one has the first
  // key of a pair; else 0.
  FLASHPORT_DEVICE Both exchange(int word, unsigned shift, unsigned swap) const {
    Both both;
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      both.own[pair] = kv::code_bytes<kFormat>(words[pair][word], shift);
      both.other[pair] = other_half(both.own[pair]);
      if constexpr (kScaled) {
        both.scales[pair] = __builtin_amdgcn_perm(other_half(scales[pair]), scales[pair], zip_halves(0) ^ swap);
      }
    }
    return both;
  }

  // Column j, from the words that hold it.
  FLASHPORT_DEVICE static Words8 operand(const Both& both, unsigned swap, int j) {
    const int at = j % kWordCols;
    Words8 a;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const auto zip = [&](unsigned selector) { return __builtin_amdgcn_perm(both.other[i], both.own[i], selector); };
      if constexpr (!kv::is_widened(kFormat)) {
        a[i] = zip(zip_halves(at) ^ swap);
      } else if constexpr (kScaled) {
        a[i] = widen_codes<kFormat>(zip(zip_bytes_low(at) ^ (swap & 0x00040004u)), both.scales[i]);
      } else {
        static_assert(kFormat == KvFormat::kFp8E4M3);
        a[i] = widen_fp8(zip(zip_bytes_high(at) ^ (swap & 0x04000400u)));
      }
    }
    return a;
  }
};

// How a block's waves share a leaf: column waves split its keys for S and the columns of V for O, row waves the rows.
template <DecodeConfig kCfg>
struct WaveShare {
  static constexpr int kColWaves = kCfg.shape.head_dim_v < 128 ? 2 : 4;
  static constexpr int kRowWaves = kCfg.tuning.waves / kColWaves;
  static constexpr int kRowTiles = kCfg.shape.rows / 16 / kRowWaves;
  static constexpr int kKeyTiles = kLeafKeys / 16 / kColWaves;
  static constexpr int kCols = kCfg.shape.head_dim_v / kColWaves;
  static constexpr int kLaneCols = kCols / 16 < 4 ? kCols / 16 : 4;
  static constexpr int kGroups = kCols / 16 / kLaneCols;  // of 16 lanes times kLaneCols columns
  static constexpr int kTileRegisters = (kCols / 16 + kKeyTiles) * kRowTiles * 8;  // of one O and one S
  static_assert(kCfg.tuning.waves % kColWaves == 0 && kCfg.shape.rows % (16 * kRowWaves) == 0);
};

// The leaf in work and the next one, seen by one wave. Loads are issued kKeyDepth and kValueDepth units ahead of use.
template <DecodeConfig kCfg>
class WmmaPipeline {
  using Share = WaveShare<kCfg>;
  using Params = DecodeParamsOf<kCfg>;
  static constexpr bool kAhead = kCfg.tuning.stages > 1;
  static constexpr bool kFactored = reads_factors(kCfg.shape);
  static_assert(!kFactored || factors_of(kCfg.shape) == Factors::kOfGroups);

 public:
  using Key = KeyUnit<kCfg.shape.k_format, kFactored>;
  using Value = ValueUnit<kCfg.shape.v_format, Share::kLaneCols, kFactored>;
  static constexpr int kKeyUnits = kCfg.shape.head_dim_qk / Key::kDims;
  static constexpr int kValueUnits = kLeafKeys / Value::kKeys * Share::kGroups;

 private:
  // For either; wide output and score tiles leave less.
  static constexpr int kRegisters = Share::kTileRegisters < 64 ? 64 : 32;
  static constexpr int kKeyFit = kRegisters / (Key::kRegisters * Share::kKeyTiles);
  static constexpr int kValueFit = kRegisters / Value::kRegisters;

 public:
  static constexpr int kKeyDepth = kKeyFit < kKeyUnits ? kKeyFit : kKeyUnits;
  static constexpr int kValueDepth = kValueFit < kValueUnits ? kValueFit : kValueUnits;

  template <class Shared>
  FLASHPORT_DEVICE WmmaPipeline(const Params& p, const Block& block, Shared&, LeafCursor& ahead)
      : block_(block), key_bytes_(p.cache.k.row_bytes), value_bytes_(p.cache.v.row_bytes), lane_(block.lane()) {
    look_up(p, ahead);
    if constexpr (kAhead) begin_keys(p, ahead);
  }
  FLASHPORT_DEVICE void refill_behind_values(const DecodeParams&, const LeafCursor&) {}

  FLASHPORT_DEVICE WmmaPipeline& keys() { return *this; }
  FLASHPORT_DEVICE WmmaPipeline& values() { return *this; }
  FLASHPORT_DEVICE void await_values(const DecodeParams&, const LeafCursor&) const {}

  // Behind keys(): the pages of the next leaf are asked for, then the first values of this one, which would hold the
  // page numbers back.
  FLASHPORT_DEVICE void refill_behind_keys(const Params& p, LeafCursor& ahead) {
    if constexpr (!kAhead) begin_keys(p, ahead);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      value_rows_[i] = row_address(p.cache.v, value_places_[i], ahead.segment.kv_head);
      if constexpr (kFactored) value_factors_[i] = row_address(p.v_factors, value_places_[i], ahead.segment.kv_head);
    }
    ahead.next(p);
    look_up(p, ahead);
#pragma unroll
    for (int unit = 0; unit < kValueDepth; ++unit) load_value(unit);
  }
  FLASHPORT_DEVICE void refill_behind_scores(const Params& p, const LeafCursor& ahead) {
    if constexpr (kAhead) begin_keys(p, ahead);
  }

  // Position of row `row` of the A operand of key tile `tile`: a lane's eight scores of a tile are then neighbours.
  FLASHPORT_DEVICE int position_of(int tile, int row) const {
    return (col_wave() * Share::kKeyTiles + tile) * 16 + row % 2 * 8 + row / 2;
  }
  // The lane's first column of a group: A operand row n is column col_of(group, n) + j of operand j.
  FLASHPORT_DEVICE int col_of(int group, int row) const {
    return col_wave() * Share::kCols + (group * 16 + row) * Share::kLaneCols;
  }

  FLASHPORT_DEVICE const Key& key(int unit, int tile) const { return keys_[unit % kKeyDepth][tile]; }
  FLASHPORT_DEVICE void load_key(int unit) {
    const int bytes = recompute_scalar(key_bytes_);
#pragma unroll
    for (int tile = 0; tile < Share::kKeyTiles; ++tile) {
      keys_[unit % kKeyDepth][tile].load(key_rows_[tile], key_factors_[kFactored ? tile : 0], unit, bytes);
    }
  }
  // Unit: 16 keys, then the groups of columns.
  FLASHPORT_DEVICE const Value& value(int unit) const { return values_[unit % kValueDepth]; }
  FLASHPORT_DEVICE void load_value(int unit) {
    const int step = unit / Share::kGroups;
    GlobalBytes rows = value_rows_[step / 2];
    const GlobalBytes factors = value_factors_[kFactored ? step / 2 : 0];
    const auto row = [&](int pair) {
      if (Share::kGroups > 1 && pair % 4 == 0) keep_order(rows);
      return from_lane(rows, step % 2 * Value::kPairs + pair);
    };
    const auto factor_row = [&](int pair) { return from_lane(factors, step % 2 * Value::kPairs + pair); };
    values_[unit % kValueDepth].load(row, factor_row, col_of(unit % Share::kGroups, lane_ % 16), value_bytes_);
  }

 private:
  FLASHPORT_DEVICE int col_wave() const { return recompute_scalar(block_.wave()) % Share::kColWaves; }

  FLASHPORT_DEVICE static GlobalBytes row_address(const CacheParams& cache, kv::TokenCoord place, int head) {
    const std::int64_t offset = kv::row_offset(cache, place, head);
    return offset < 0 ? zero_row() : (GlobalBytes)(cache.data) + offset;
  }

  FLASHPORT_DEVICE static kv::TokenCoord place(const DecodeParams& p, const LeafCursor& ahead, int key) {
    const Segment& s = ahead.segment;
    const int token = ahead.key() + key;
    return kv::token_coord(p.cache, s.pages, s.seq, token, token >= s.key_low && token < s.key_high && !ahead.done());
  }

  // One leaf before the addresses are needed: for keys, the lane's own rows; for values, every row by one lane.
  FLASHPORT_DEVICE void look_up(const DecodeParams& p, const LeafCursor& ahead) {
#pragma unroll
    for (int tile = 0; tile < Share::kKeyTiles; ++tile)
      key_places_[tile] = place(p, ahead, key_at(position_of(tile, lane_ % 16)));
#pragma unroll
    for (int i = 0; i < 2; ++i) value_places_[i] = place(p, ahead, i * kWaveSize + lane_);
  }

  FLASHPORT_DEVICE void begin_keys(const Params& p, const LeafCursor& ahead) {
    const int head = ahead.segment.kv_head;
#pragma unroll
    for (int tile = 0; tile < Share::kKeyTiles; ++tile) {
      key_rows_[tile] = row_address(p.cache.k, key_places_[tile], head);
      if constexpr (kFactored) key_factors_[tile] = row_address(p.k_factors, key_places_[tile], head);
    }
#pragma unroll
    for (int unit = 0; unit < kKeyDepth; ++unit) load_key(unit);
  }

  const Block& block_;
  int key_bytes_, value_bytes_, lane_;
  kv::TokenCoord key_places_[Share::kKeyTiles], value_places_[2];
  GlobalBytes key_rows_[Share::kKeyTiles], value_rows_[2];
  GlobalBytes key_factors_[kFactored ? Share::kKeyTiles : 1] = {}, value_factors_[kFactored ? 2 : 1] = {};
  Key keys_[kKeyDepth][Share::kKeyTiles];
  Value values_[kValueDepth];
};

}  // namespace flashport::FLASHPORT_TARGET::decode
