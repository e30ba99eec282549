// The factors of whole rows, of fp32 or fp16, where a tile has them (kv_pipeline.h): they multiply scores, and
// probabilities before these become operands. Without factors they are 1.
#pragma once

#include "cuda/decode/kv_pipeline.h"

namespace flashport::FLASHPORT_TARGET::decode {

template <DecodeConfig kCfg>
class RowFactors {
  using Tiles = KvTiles<kCfg>;
  using Word = typename Tiles::FactorOfRow;

 public:
  RowFactors() = default;
  // For a head that `team` works on and a lane whose first key is row `first_row` of a tile; its others are an even
  // number of rows on.
  FLASHPORT_DEVICE RowFactors(const FactorDecodeParams& p, int head, int team, int first_row)
      : first_byte_(team * static_cast<int>(sizeof(DecodeShared<kCfg>)) + Tiles::kFactorsByte +
                    first_row * static_cast<int>(sizeof(Word))),
        key_shift_(shift_of(p.k_factors, head, first_row)),
        value_shift_(shift_of(p.v_factors, head, first_row)) {}

  // The factors of row `key` from the lane's first one on.
  FLASHPORT_DEVICE float of_key(const char* tile, int key) const { return read(tile, key, key_shift_); }
  FLASHPORT_DEVICE float of_value(const char* tile, int key) const {
    return read(tile, tile_keys(kCfg) + key, value_shift_);
  }

 private:
  static constexpr int kWhole = -1;
  // By how many bits a factor of fp16 lies into its word: rows of odd numbers are those of tokens of odd numbers, as
  // tiles begin with even ones.
  FLASHPORT_DEVICE static int shift_of(const CacheParams& factors, int head, int row) {
    if (factors.data == nullptr || factors.row_bytes == static_cast<int>(sizeof(Word))) return kWhole;
    return static_cast<int>(head * factors.head_stride + row * factors.token_stride & 2) * 8;
  }
  FLASHPORT_DEVICE float read(const char* tile, int place, int shift) const {
    const Word word = *reinterpret_cast<const Word*>(tile + first_byte_ + place * static_cast<int>(sizeof(Word)));
    if (shift == kWhole) return __uint_as_float(word);
    return to_float(__builtin_bit_cast(Half, static_cast<std::uint16_t>(word >> shift)));
  }

  int first_byte_, key_shift_, value_shift_;
};

// Where keys or values have no factors, all places of the team's ring have 1 in their stead. A barrier of the block
// follows.
template <DecodeConfig kCfg>
FLASHPORT_DEVICE void fill_factors(const FactorDecodeParams& p, KvRing<kCfg>& ring, int thread, int threads) {
  constexpr int kKeys = tile_keys(kCfg);
  if (p.k_factors.data != nullptr && p.v_factors.data != nullptr) return;
#pragma unroll 1
  for (int i = thread; i < KvRing<kCfg>::kTiles * 2 * kKeys; i += threads) {
    const bool of_key = i % (2 * kKeys) < kKeys;
    if ((of_key ? p.k_factors : p.v_factors).data != nullptr) continue;
    char* factors = ring.tile(i / (2 * kKeys)) + KvTiles<kCfg>::kFactorsByte;
    reinterpret_cast<float*>(factors)[i % (2 * kKeys)] = 1.0f;
  }
}

// What each row's probabilities times the factors of values have been divided by, in each part of the keys.
template <DecodeConfig kCfg>
struct PartUnits {
  float2 of[2][turn_parts(kCfg)][kCfg.shape.rows / 2];  // of two neighbouring rows
};

// A power of two near `largest`, so that what it divides are numbers of fp16; its inverse is normal, too.
FLASHPORT_DEVICE float unit_of(float largest) {
  constexpr unsigned kExponent = 0x7f800000, kLeast = 0x00800000, kMost = 0x7e000000;
  return __uint_as_float(minimum(maximum(__float_as_uint(largest) & kExponent, kLeast), kMost));
}
FLASHPORT_DEVICE float inverse_of_unit(float unit) { return __uint_as_float(0x7f000000u - __float_as_uint(unit)); }

}  // namespace flashport::FLASHPORT_TARGET::decode
