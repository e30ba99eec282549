// Leaves of K and V on their way from memory into the registers of the waves that multiply them, as A operands of MFMA.
// Shared memory takes no part: keys are split among the waves, values by columns, so nothing is loaded twice.
//
// A wave's lane = 16 g + n. Key n of each key tile is the lane's, and of that row the units
// 4 c + g of 16 bytes (16-bit types: 8 dims, byte types: 16, q4_0: a block of 32): 4 lanes read 64 bytes. The order of
// the dims that this makes is the query's too. A lane has of V kLaneCols neighbouring columns (16 bytes of a 16-bit
// type where a wave has 128 columns) of keys 4 g + 0..3 of every 16: 16 lanes read a wave's columns of a key. In q4_0
// two lanes read the same bytes, for the columns in their low and in their high bits. Scales come with what they scale:
// of blocks, or of groups of 8 values, which lie in rows of their own.
//
// While a leaf's scores are computed its values are in flight, and after them the keys of the next.
#pragma once

#include <type_traits>

#include "common/device/decode/config.h"
#include "common/device/decode/schedule.h"
#include "common/device/decode/segments.h"
#include "hip/arch/mfma.h"
#include "hip/kv/widen.h"

namespace flashport::FLASHPORT_TARGET::decode {

// How the waves of a block share a leaf.
template <DecodeConfig kCfg>
struct WaveSplit {
  static constexpr KvFormat kKeyFormat = product_format(kCfg.shape, kCfg.shape.k_format);
  static constexpr KvFormat kValueFormat = product_format(kCfg.shape, kCfg.shape.v_format);
  static constexpr bool kFactored = reads_factors(kCfg.shape);
  static_assert(!kFactored || factors_of(kCfg.shape) == Factors::kOfGroups);
  static constexpr bool kScalesKeys = kFactored || kv::has_scales(kKeyFormat);
  static constexpr bool kScalesValues = kFactored || kv::has_scales(kValueFormat);
  static constexpr int kRowTiles = kCfg.shape.rows / 16;
  static constexpr int kColWaves = kCfg.tuning.waves;
  static constexpr int kKeyTiles = kLeafKeys / 16 / kColWaves;
  static constexpr int kWaveCols = kCfg.shape.head_dim_v / kColWaves;
  static constexpr int kLaneCols = kWaveCols / 16;
  static constexpr int kUnitDims = 16 * 8 / kv::code_bits(kKeyFormat);
  static constexpr int kUnits = kCfg.shape.head_dim_qk / (4 * kUnitDims);  // of a lane in a key's row
  static constexpr int kValueWords = kLaneCols * (kv::is_widened(kValueFormat) ? 1 : 2) / 4;
  static constexpr int kSteps = kLeafKeys / 16;  // of 16 keys
  static constexpr int kQueryRegisters = kCfg.shape.rows * kCfg.shape.head_dim_qk / (2 * kWaveSize);
  static constexpr bool kKeepsQuery = kQueryRegisters <= 96;  // else a leaf reads it from shared memory
  static_assert(kKeyTiles >= 1 && kLaneCols % 4 == 0 && kLaneCols <= 8);
};

// Byte offsets of a leaf's rows in the caches, -1 for no row, as one wave looked them up.
struct LeafRows {
  alignas(16) std::int64_t keys[kLeafKeys];
  alignas(16) std::int64_t values[kLeafKeys];
};
// And of the rows' factors.
struct FactoredLeafRows : LeafRows {
  alignas(16) std::int64_t key_factors[kLeafKeys];
  alignas(16) std::int64_t value_factors[kLeafKeys];
};
template <DecodeConfig kCfg>
using LeafRowsOf = std::conditional_t<WaveSplit<kCfg>::kFactored, FactoredLeafRows, LeafRows>;

template <DecodeConfig kCfg>
struct KeyFragments {
  using Split = WaveSplit<kCfg>;
  unsigned words[Split::kKeyTiles][Split::kUnits][4];
  unsigned scales[Split::kKeyTiles][Split::kUnits];  // of a block, or of two groups
};

template <DecodeConfig kCfg>
struct ValueFragments {
  using Split = WaveSplit<kCfg>;
  unsigned words[Split::kSteps][4][Split::kValueWords];  // step, key, columns
  unsigned scales[Split::kSteps][4];                     // of a block or a group
};

template <DecodeConfig kCfg, class Shared>
class MfmaPipeline {
  using Split = WaveSplit<kCfg>;
  using Params = DecodeParamsOf<kCfg>;
  static constexpr KvFormat kKeyFormat = Split::kKeyFormat, kValueFormat = Split::kValueFormat;

 public:
  FLASHPORT_DEVICE MfmaPipeline(const Params& p, const Block& block, Shared& shared, LeafCursor& ahead)
      : rows_(shared.rows[block.wave()]),
        lane_(block.lane()),
        col_wave_(block.wave() % Split::kColWaves),
        n_(block.lane() % 16),
        g_(block.lane() / 16) {
    look_up(p, ahead);
    load_keys(p, ahead);
  }

  FLASHPORT_DEVICE const KeyFragments<kCfg>& keys() const { return keys_; }
  FLASHPORT_DEVICE const ValueFragments<kCfg>& values() const { return values_; }
  FLASHPORT_DEVICE void await_values(const DecodeParams&, const LeafCursor&) const {}

  // The leaf's own values; its keys are in flight or there. The next leaf is looked up first: loads return in order,
  // and its keys are asked for while these values are in flight.
  FLASHPORT_DEVICE void refill_behind_keys(const Params& p, LeafCursor& ahead) {
    const Params& again = reread(p);  // scalar registers are short, and there is time
    rows_.values[lane_] = kv::row_offset(again.cache.v, place_, ahead.segment.kv_head);
    if constexpr (Split::kFactored) {
      rows_.value_factors[lane_] = kv::row_offset(again.v_factors, place_, ahead.segment.kv_head);
    }
    ahead.next(again);
    if (!ahead.done()) look_up(again, ahead);
    load_values(again);
  }
  FLASHPORT_DEVICE void refill_behind_scores(const Params& p, const LeafCursor& ahead) {
    if (!ahead.done()) load_keys(reread(p), ahead);
  }
  FLASHPORT_DEVICE void refill_behind_values(const DecodeParams&, const LeafCursor&) {}

 private:
  // Lane i looks up key i of the leaf, while another leaf is worked on.
  FLASHPORT_DEVICE void look_up(const DecodeParams& p, const LeafCursor& ahead) {
    const Segment& s = ahead.segment;
    const int token = ahead.key() + lane_;
    place_ = kv::token_coord(p.cache, s.pages, s.seq, token, token >= s.key_low && token < s.key_high);
  }

  FLASHPORT_DEVICE void load_keys(const Params& p, const LeafCursor& ahead) {
    rows_.keys[lane_] = kv::row_offset(p.cache.k, place_, ahead.segment.kv_head);
    if constexpr (Split::kFactored) {
      rows_.key_factors[lane_] = kv::row_offset(p.k_factors, place_, ahead.segment.kv_head);
    }
    share_in_wave();
    const auto data = (GlobalBytes)(p.cache.k.data);
    const int cache_row_bytes = p.cache.k.row_bytes;
#pragma unroll
    for (int tile = 0; tile < Split::kKeyTiles; ++tile) {
      const int key = (col_wave_ * Split::kKeyTiles + tile) * 16 + n_;
      const std::int64_t offset = rows_.keys[key];
      const GlobalBytes row = row_address(data, offset);
      const int row_bytes = offset < 0 ? kZeroBytes : cache_row_bytes;
#pragma unroll
      for (int c = 0; c < Split::kUnits; ++c) {
        const int dim = (4 * c + g_) * Split::kUnitDims;
        const int byte = kv::element_byte<kKeyFormat>(dim);
        load_unit(keys_.words[tile][c], row, byte, row_bytes);
        if constexpr (kv::has_scales(kKeyFormat)) {
          const int scale = kv::scale_byte<kKeyFormat>(dim);
          keys_.scales[tile][c] = load_half_word(scale < row_bytes ? row + scale : zero_row());
        } else if constexpr (Split::kFactored) {
          const GlobalBytes factors = row_address((GlobalBytes)(p.k_factors.data), rows_.key_factors[key]);
          keys_.scales[tile][c] = load_words<1>(factors + kv::factor_byte(dim))[0];
        }
      }
    }
    __builtin_amdgcn_sched_barrier(0);  // nothing that waits for memory goes before these loads
  }

  // 16 bytes of a key's row, zero past its end: the query is zero there, but 0 * NaN is not. fp8 rows are multiples of
  // 8 bytes, all others of what is loaded at a time.
  FLASHPORT_DEVICE static void load_unit(unsigned (&to)[4], GlobalBytes row, int byte, int row_bytes) {
    constexpr bool kMayEndInside = kv::is_widened(kKeyFormat) && !Split::kScalesKeys;
    if constexpr (Split::kFactored) {  // such rows fill the tile
      load_words(to, row + byte);
    } else if (kMayEndInside && row_bytes % 16 != 0) {
      unsigned half[2][2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        load_words(half[i], byte + 8 * i < row_bytes ? row + byte + 8 * i : zero_row());
        to[2 * i] = half[i][0];
        to[2 * i + 1] = half[i][1];
      }
    } else {
      load_words(to, byte < row_bytes ? row + byte : zero_row());
    }
  }

  // Columns past the end of a row repeat its first: nothing reads them.
  FLASHPORT_DEVICE void load_values(const Params& p) {
    share_in_wave();
    const auto data = (GlobalBytes)(p.cache.v.data);
    int col = col_wave_ * Split::kWaveCols + n_ * Split::kLaneCols;
    if (kv::element_byte<kValueFormat>(col) >= p.cache.v.row_bytes) col = 0;
#pragma unroll
    for (int step = 0; step < Split::kSteps; ++step) {
#pragma unroll
      for (int key = 0; key < 4; ++key) {
        const int place = 16 * step + 4 * g_ + key;
        const GlobalBytes row = row_address(data, rows_.values[place]);
        load_words(values_.words[step][key], row + kv::element_byte<kValueFormat>(col));
        if constexpr (kv::has_scales(kValueFormat)) {
          values_.scales[step][key] = load_half_word(row + kv::scale_byte<kValueFormat>(col));
        } else if constexpr (Split::kFactored) {
          const GlobalBytes factors = row_address((GlobalBytes)(p.v_factors.data), rows_.value_factors[place]);
          values_.scales[step][key] = load_half_word(factors + kv::factor_byte(col));
        }
      }
    }
    __builtin_amdgcn_sched_barrier(0);
  }

  FLASHPORT_DEVICE static GlobalBytes row_address(GlobalBytes data, std::int64_t offset) {
    const GlobalBytes row = data + offset;
    return offset < 0 ? zero_row() : row;
  }

  // A wave's lanes see what its other lanes have written: no instruction, but nothing moves past it.
  FLASHPORT_DEVICE static void share_in_wave() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
    __builtin_amdgcn_wave_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
  }

  LeafRowsOf<kCfg>& rows_;
  int lane_, col_wave_, n_, g_;
  kv::TokenCoord place_;
  KeyFragments<kCfg> keys_;
  ValueFragments<kCfg> values_;
};

}  // namespace flashport::FLASHPORT_TARGET::decode
