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
          const unsigned biased = raw[2 * unit + half] ^ 0x80808080u;
          a[unit][half] = multiply_halves(int8_numbers<0, 1>(biased), factor);
          a[unit][half + 2] = multiply_halves(int8_numbers<2, 3>(biased), factor);
        }
      } else {
        const unsigned factor = __byte_perm(second_word_ ? four.y : four.x, 0, factor_of_lane_);
        const unsigned biased = raw[half] ^ 0x88888888u;
        a[0][half] = multiply_halves(int4_numbers<0>(biased), factor);
        a[0][half + 2] = multiply_halves(int4_numbers<1>(biased), factor);
        a[1][half] = multiply_halves(int4_numbers<2>(biased), factor);
        a[1][half + 2] = multiply_halves(int4_numbers<3>(biased), factor);
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
        const unsigned factor = factor_of(i % 2, i / 2);
        const unsigned biased = raw[i] ^ 0x80808080u;
        unsigned* pairs = &a[i / 2][i % 2 * 2];
        pairs[0] = multiply_halves(int8_numbers<0, 2>(biased), factor);
        pairs[1] = multiply_halves(int8_numbers<1, 3>(biased), factor);
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
        const unsigned factor = factor_of(half, 0);
        const unsigned biased = raw[half] ^ 0x88888888u;
        a[0][2 * half] = multiply_halves(int4_numbers<0>(biased), factor);
        a[0][2 * half + 1] = multiply_halves(int4_numbers<1>(biased), factor);
        a[1][2 * half] = multiply_halves(int4_numbers<2>(biased), factor);
        a[1][2 * half + 1] = multiply_halves(int4_numbers<3>(biased), factor);
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
