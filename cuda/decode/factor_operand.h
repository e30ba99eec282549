// Operands of int8 and int4. Their factors, of fp16 and for eight values each, lie in rows of their own behind the
// codes of a tile (kv_pipeline.h). Codes become numbers of fp16, which are multiplied by their factor.
//
// Keys: of 32 dims of a row, int8 gives lane 4 g + c four neighbours from each of two units, with the factors c / 2 and
// 2 + c / 2, and int4 eight neighbours, with factor c. Values: of 32 columns and two keys, int8 gives it columns 2 g
// and 2 g + 1 of 16 from each of two units, and int4 columns 4 g .. 4 g + 3 (lane_maps.h).
#pragma once

#include "cuda/decode/kv_operand.h"

namespace flashport::FLASHPORT_TARGET::decode {

// Codes `kPlace` and `kPlace` + 4 of eight codes of int4 + 8, as numbers of fp16.
template <int kPlace>
FLASHPORT_DEVICE unsigned int4_numbers(unsigned biased) {
  const unsigned shifted = biased >> kPlace / 2 * 8;
  if constexpr (kPlace % 2 == 0) {
    return add_halves(mask_and_set<0x000f000fu, 0x64006400u>(shifted), 0xe408e408u);  // of 1024 + biased less 1032
  } else {  // of 1024 + 16 biased: its 16th part less 72
    return fma_halves(mask_and_set<0x00f000f0u, 0x64006400u>(shifted), 0x2c002c00u, 0xd480d480u);
  }
}

// Codes times the two factors that a word of numbers meets.
template <bool kTransposed>
FLASHPORT_DEVICE void int8_values(unsigned& first, unsigned& second, unsigned four, unsigned factor) {
  widen_bytes<KvFormat::kInt8, kTransposed>(first, second, four);
  first = multiply_halves(first, factor);
  second = multiply_halves(second, factor);
}
FLASHPORT_DEVICE void int4_values(unsigned& first, unsigned& second, unsigned& third, unsigned& fourth, unsigned eight,
                                  unsigned factor) {
  const unsigned biased = eight ^ 0x88888888u;
  first = multiply_halves(int4_numbers<0>(biased), factor);
  second = multiply_halves(int4_numbers<1>(biased), factor);
  third = multiply_halves(int4_numbers<2>(biased), factor);
  fourth = multiply_halves(int4_numbers<3>(biased), factor);
}

template <DecodeConfig kCfg, KvFormat kFormat>
  requires(factors_of(kCfg.shape) == Factors::kOfGroups)
struct KeyOperand<kCfg, kFormat> {
  using Layout = typename KvTiles<kCfg>::Keys;
  using FactorRows = typename KvTiles<kCfg>::FactorRows;

  // For the wave whose keys begin with `first_key`, a multiple of 16.
  FLASHPORT_DEVICE KeyOperand(int lane, int first_key, const HeadPlace& head)
      : places_(first_key + lane % 16, lane & 16, head.byte),
        factors_(FactorRows::offset(first_key + lane / 4, head.byte / Layout::kHeadBytes * FactorRows::kHeadBytes)),
        factor_of_lane_((kFormat == KvFormat::kInt4 ? lane % 2 : lane % 4 / 2) == 0 ? 0x1010u : 0x3232u),
        second_word_(kFormat == KvFormat::kInt4 && lane % 4 >= 2) {}

  FLASHPORT_DEVICE void load(unsigned (&a)[2][4], KeyFactors&, unsigned (&kept)[kept_words(kFormat)], const char* tile,
                             int key, int group) const {
    unsigned raw[4];
    if constexpr (kFormat == KvFormat::kInt8) {
      ldmatrix_x4(raw, places_.at(tile, key, 32 * group));
    } else if (group % 2 == 0) {  // two groups' units
      ldmatrix_x4(raw, places_.at(tile, key, 16 * group));
      for (int half = 0; half < 2; ++half) kept[half] = raw[2 + half];
    } else {
      for (int half = 0; half < 2; ++half) raw[half] = kept[half];
    }
    for (int half = 0; half < 2; ++half) {
      const char* row = tile + KvTiles<kCfg>::kFactorsByte + FactorRows::row_offset(key + 8 * half);
      const auto four = *reinterpret_cast<const uint2*>(row + ((factors_ ^ group / 2 * 16) + group % 2 * 8));
      if constexpr (kFormat == KvFormat::kInt8) {
        for (int unit = 0; unit < 2; ++unit) {
          const unsigned factor = __byte_perm(unit == 0 ? four.x : four.y, 0, factor_of_lane_);
          int8_values<false>(a[unit][half], a[unit][half + 2], raw[2 * unit + half], factor);
        }
      } else {
        const unsigned factor = __byte_perm(second_word_ ? four.y : four.x, 0, factor_of_lane_);
        int4_values(a[0][half], a[0][half + 2], a[1][half], a[1][half + 2], raw[half], factor);
      }
    }
  }

 private:
  LanePlaces<Layout, Layout::kHeadBytes> places_;
  unsigned factors_;         // where those of the lane's row begin
  unsigned factor_of_lane_;  // in a word of two, twice
  bool second_word_;
};

template <DecodeConfig kCfg, KvFormat kFormat, int kGroups>
  requires(factors_of(kCfg.shape) == Factors::kOfGroups)
struct ValueOperand<kCfg, kFormat, kGroups> {
  using Layout = typename KvTiles<kCfg>::Values;
  using FactorRows = typename KvTiles<kCfg>::FactorRows;
  static constexpr int kTiles = value_tiles(kFormat);
  static constexpr int kGroupBytes = kv_row_bytes(kFormat, 32);
  static constexpr int kFactors = 4;  // of a group
  static_assert(kGroups <= 2, "a wave's factors lie in one unit");

  // For the wave whose columns begin with group `first_group`, a multiple of kGroups.
  FLASHPORT_DEVICE ValueOperand(int lane, int first_group, const HeadPlace& head)
      : places_(lane % 16, lane & 16, head.byte + kGroupBytes * first_group),
        factors_(FactorRows::offset(lane % 16,
                                    head.byte / Layout::kHeadBytes * FactorRows::kHeadBytes + first_group / 2 * 16)),
        its_factor_(4 * (first_group % 2 * kFactors + lane / 4 / (kFormat == KvFormat::kInt8 ? 4 : 2)) + lane % 4) {}

  FLASHPORT_DEVICE static constexpr int first_block(int) { return 0; }

  FLASHPORT_DEVICE void load(unsigned (&a)[kTiles][4], ValueFactors&, unsigned (&kept)[kept_words(kFormat)],
                             const char* tile, int key, int group) const {
    if (group == 0) {
      unsigned factors[2];
      ldmatrix_x2_trans(factors, tile + factors_ + (KvTiles<kCfg>::kFactorsByte + FactorRows::row_offset(key)));
      for (int half = 0; half < 2; ++half) kept[half] = factors[half];
    }
    // The factors of two keys, from the lane that has them.
    const auto factor_of = [&](int half, int unit) {
      return __shfl_sync(~0u, kept[half], its_factor_ + 4 * (kFactors * group + 2 * unit));
    };
    if constexpr (kFormat == KvFormat::kInt8) {
      unsigned raw[4];
      ldmatrix_x4_trans(raw, places_.at(tile, key, kGroupBytes * group));
      for (int i = 0; i < 4; ++i) {
        unsigned* pairs = &a[i / 2][i % 2 * 2];
        int8_values<true>(pairs[0], pairs[1], raw[i], factor_of(i % 2, i / 2));
      }
    } else {
      unsigned raw[2];
      if constexpr (kGroups == 1) {
        ldmatrix_x2_trans(raw, places_.at(tile, key, 0));
      } else if (group == 0) {
        unsigned both[4];
        ldmatrix_x4_trans(both, places_.at(tile, key, 0));
        for (int half = 0; half < 2; ++half) raw[half] = both[half], kept[2 + half] = both[2 + half];
      } else {
        for (int half = 0; half < 2; ++half) raw[half] = kept[2 + half];
      }
      for (int half = 0; half < 2; ++half) {
        int4_values(a[0][2 * half], a[0][2 * half + 1], a[1][2 * half], a[1][2 * half + 1], raw[half],
                    factor_of(half, 0));
      }
    }
  }

 private:
  static constexpr int kPlacesBytes = kGroups * kGroupBytes < 32 ? 32 : kGroups * kGroupBytes;
  LanePlaces<Layout, kPlacesBytes> places_;
  unsigned factors_;  // where those of the wave's columns begin, in the lane's row
  int its_factor_;    // the lane that has the first of this one's
};

}  // namespace flashport::FLASHPORT_TARGET::decode
