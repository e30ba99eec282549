// Blocks of 32 values at once, as common/device/kv/widen.h has four: the same bits, in fewer instructions of the pipe
// that has half the rate of the others, which permutes bytes, masks and packs.
//
// `Row` as there; crossed_word(byte) is word(byte) with its two middle bytes exchanged.
#pragma once

#include "common/device/kv/widen.h"

namespace flashport::FLASHPORT_TARGET::kv {

// Nibbles are taken a word at a time, its low ones and its high ones, 16 values later: as 1024 + code, and
// 1024 + 16 code.
template <KvFormat kFormat>
inline constexpr bool kInNibbles = kFormat == KvFormat::kQ4_0 || kFormat == KvFormat::kQ4_1;

template <MathType kMath, KvFormat kFormat, class Row>
FLASHPORT_DEVICE void load_block(Words2 (&x)[8], const Row& row) {
  if constexpr (kInNibbles<kFormat> && kMath == MathType::kFp16) {
    constexpr unsigned kMiddle = kHasMinimum<kFormat> ? 0 : 8;
    constexpr unsigned kLowLess = 0xe400e400u + 0x10001u * kMiddle;          // -(1024 + middle)
    constexpr unsigned kHighLess = 0xd400d400u + 0x10001u * (16 * kMiddle);  // -(64 + middle)
    const unsigned scale = both_halves(block_scale<kFormat>(row, 0));
    unsigned minimum = 0;
    if constexpr (kHasMinimum<kFormat>) minimum = both_halves(block_minimum<kFormat>(row, 0));
    const auto scaled = [&](unsigned codes) FLASHPORT_INLINE {
      return kHasMinimum<kFormat> ? fma_halves(codes, scale, minimum) : FLASHPORT_TARGET::multiply_halves(codes, scale);
    };
    const auto low = [&](unsigned word) FLASHPORT_INLINE {
      return scaled(add_halves(mask_and_set<0x000f000fu, 0x64006400u>(word), kLowLess));
    };
    const auto high = [&](unsigned word) FLASHPORT_INLINE {
      return scaled(fma_halves(mask_and_set<0x00f000f0u, 0x64006400u>(word), 0x2c002c00u, kHighLess));
    };
    FLASHPORT_UNROLL(4)
    for (int i = 0; i < 4; ++i) {
      const unsigned word = row.crossed_word(kv_format_trait(kFormat).scale_bytes + 4 * i);
      x[i] = {low(word), low(word >> 8)};
      x[4 + i] = {high(word), high(word >> 8)};
    }
  } else if constexpr (kInBlocks<kFormat> && !kHasMinimum<kFormat> && kMath == MathType::kBf16 &&
                       kMiddleCode<kFormat> <= 16) {
    // A code as the low byte of the bf16 number -(128 + code). The scale is the sum of two numbers of bf16, of eight
    // bits and of two: the product of a code with the second one is exact, and so the sum is rounded once.
    const auto both = [](float x) FLASHPORT_INLINE { return floats_to_bf16(Floats2{x, x}); };
    const float scale = -half_to_float(block_scale<kFormat>(row, 0));
    const unsigned high = both(scale), low = both(scale - bf16_to_floats(high).x);
    // No constant for the compiler, which would bring it from a uniform register each time; NaN if the scale is no
    // number. Its upper byte is that of the codes, too.
    const unsigned middle = both(fma_rn(scale, 0.0f, -(128.0f + kMiddleCode<kFormat>)));
    const auto scaled = [&](unsigned two) FLASHPORT_INLINE {
      const unsigned code = subtract_bf16(two, middle);
      return fma_bf16(code, high, multiply_bf16(code, low));
    };
    FLASHPORT_UNROLL(8)
    for (int i = 0; i < 8; ++i) {
      const unsigned codes = four_codes<kFormat>(row, 4 * i);
      x[i] = {scaled(pick_bytes<0x05010500>(middle, codes)), scaled(pick_bytes<0x05030502>(middle, codes))};
    }
  } else if constexpr (kInBlocks<kFormat> && !kHasMinimum<kFormat> && kMath == MathType::kBf16) {
    // A code as the float 2^15 + code, whose second byte it is. Products with the scale, and so their sum, are exact.
    const float scale = half_to_float(block_scale<kFormat>(row, 0));
    const float less = -(32768.0f + kMiddleCode<kFormat>)*scale;
    const auto value = [&](unsigned bits)
                           FLASHPORT_INLINE { return fma_rn(__builtin_bit_cast(float, bits), scale, less); };
    FLASHPORT_UNROLL(8)
    for (int i = 0; i < 8; ++i) {
      const unsigned codes = four_codes<kFormat>(row, 4 * i);
      x[i] = {floats_to_bf16(Floats2{value(pick_bytes<0x07040004>(0x47000000u, codes)),
                                     value(pick_bytes<0x07040104>(0x47000000u, codes))}),
              floats_to_bf16(Floats2{value(pick_bytes<0x07040204>(0x47000000u, codes)),
                                     value(pick_bytes<0x07040304>(0x47000000u, codes))})};
    }
  } else {
    FLASHPORT_UNROLL(8)
    for (int i = 0; i < 8; ++i) x[i] = load_four<kMath, kFormat, false>(row, 4 * i, 1.0f);
  }
}

}  // namespace flashport::FLASHPORT_TARGET::kv
