// The factors of whole rows, of fp32 or fp16, where a tile has them (kv_pipeline.h): they multiply scores, and
// probabilities before these become operands.
#pragma once

#include "cuda/decode/kv_pipeline.h"

namespace flashport::FLASHPORT_TARGET::decode {

template <DecodeConfig kCfg>
class RowFactors {
  using Tiles = KvTiles<kCfg>;
  using Word = typename Tiles::FactorOfRow;

 public:
  RowFactors() = default;
  // Of a head that `team` works on, for a lane whose first key is row `first_row` of a tile.
  FLASHPORT_DEVICE RowFactors(const FactorDecodeParams& p, int head, int team, int first_row)
      : first_byte_(team * static_cast<int>(sizeof(DecodeShared<kCfg>)) + Tiles::kFactorsByte +
                    first_row * static_cast<int>(sizeof(Word))),
        key_shift_(shift_of(p.k_factors, head)),
        value_shift_(shift_of(p.v_factors, head)) {}

  // Of row `key` from the lane's first one on.
  FLASHPORT_DEVICE float of_key(const char* tile, int key) const { return read(tile, key, key_shift_); }
  FLASHPORT_DEVICE float of_value(const char* tile, int key) const {
    return read(tile, tile_keys(kCfg) + key, value_shift_);
  }

 private:
  static constexpr int kWhole = -1;
  // By how many bits a factor of fp16 lies into its word.
  FLASHPORT_DEVICE static int shift_of(const CacheParams& factors, int head) {
    if (factors.row_bytes == static_cast<int>(sizeof(Word))) return kWhole;
    return static_cast<int>(reinterpret_cast<std::uintptr_t>(factors.data) + head * factors.head_stride & 2) * 8;
  }
  FLASHPORT_DEVICE float read(const char* tile, int place, int shift) const {
    const Word word = *reinterpret_cast<const Word*>(tile + first_byte_ + place * static_cast<int>(sizeof(Word)));
    if (shift == kWhole) return __uint_as_float(word);
    return to_float(__builtin_bit_cast(Half, static_cast<std::uint16_t>(word >> shift)));
  }

  int first_byte_, key_shift_, value_shift_;
};

// What the probabilities of each part have been divided by for the largest factor of its values.
template <DecodeConfig kCfg>
struct PartUnits {
  float of[2][turn_parts(kCfg)];
};

// Divides the factors of 16 kTiles keys, of which a lane has two of each 16, by a power of two near the largest, so
// that probabilities times factors are fp16 numbers. Returns it.
template <int kTiles>
FLASHPORT_DEVICE float divide_by_unit(float (*factors)[2]) {
  float largest = 0.0f;
  for (int i = 0; i < 2 * kTiles; ++i) largest = maximum(largest, fabsf(factors[i / 2][i % 2]));
  for (int distance = 4; distance < kWaveSize; distance *= 2) {
    largest = maximum(largest, __shfl_xor_sync(~0u, largest, distance));
  }
  constexpr int kLeast = 0x00800000, kMost = 0x7e000000;  // whose inverse is normal, too
  const int unit = minimum(maximum(__float_as_int(largest) & 0x7f800000, kLeast), kMost);
  const float inverse = __int_as_float(0x7f000000 - unit);
  for (int i = 0; i < 2 * kTiles; ++i) factors[i / 2][i % 2] *= inverse;
  return __int_as_float(unit);
}

}  // namespace flashport::FLASHPORT_TARGET::decode
