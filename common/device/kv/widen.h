// Every format that GPUs read as fp16: four neighbouring values of a row from its bytes, as two words of two values
// each, the first in the low half. A routine for each format; kernels that read all of them call widen_unit() and know
// no format themselves.
//
// A value is rounded once: x = scale * code (+ minimum, by one fma), whether the scale is a block's, of fp16, or lies
// beside the cache (KeyScales), of any precision.
//
// `Row`: word(byte) are the four bytes from an even byte of the row on, half(byte) are two. What follows the row's last
// byte may be anything.
#pragma once

#include "common/device/core/constant.h"
#include "common/device/core/types.h"
#include "common/device/kv/format.h"
#include FLASHPORT_WORDS_HEADER

namespace flashport::FLASHPORT_TARGET::kv {

inline constexpr int kUnitValues = 16;  // of every format, and one or two of a unit share a factor

FLASHPORT_DEVICE unsigned both_halves(unsigned half) { return half * 0x10001u; }
FLASHPORT_DEVICE float half_to_float(unsigned half) {
  return to_float(__builtin_bit_cast(Half, static_cast<std::uint16_t>(half)));
}

// Four codes of a byte each, up to 255, less `middle`: 0x6400 is 1024, in whose neighbourhood fp16 counts in ones.
template <int kMiddle>
FLASHPORT_DEVICE Words2 codes_as_halves(unsigned codes) {
  constexpr unsigned kLess = 0xe400e400u + 0x10001u * kMiddle;  // -(1024 + middle)
  return {add_halves(pick_bytes<0x04010400>(0x64646464u, codes), kLess),
          add_halves(pick_bytes<0x04030402>(0x64646464u, codes), kLess)};
}

// What the codes of iq4_nl stand for (blocks.h), as signed bytes.
FLASHPORT_DEVICE unsigned iq4_nl_bytes(unsigned codes) {
  const unsigned places = codes & 0x07070707u;
  const unsigned low = pick_each(0xf6eaddcfu, 0xbfad9881u, places), high = pick_each(0x71594535u, 0x26190d01u, places);
  const unsigned is_high = bytes_of_ones(codes >> 3 & 0x01010101u);
  return (high & is_high) | (low & ~is_high);
}

// Bits 0 to 3, each as the fifth bit of a byte.
FLASHPORT_DEVICE unsigned fifth_bits(unsigned four) { return ((four & 15u) * 0x00204081u & 0x01010101u) << 4; }

// Whether values are scale * code or scale * code + minimum, of blocks.
template <KvFormat kFormat>
inline constexpr bool kInBlocks = kv_format_trait(kFormat).scale_bytes > 0;
template <KvFormat kFormat>
inline constexpr bool kHasMinimum = kv_format_trait(kFormat).scale_bytes == 4;

// Formats of integers: values are codes of up to 255, a byte each, less this.
template <KvFormat kFormat>
inline constexpr int kMiddleCode =
    kFormat == KvFormat::kInt8 || kFormat == KvFormat::kQ8_0 || kFormat == KvFormat::kIq4Nl ? 128
    : kHasMinimum<kFormat>                                                                  ? 0
    : kFormat == KvFormat::kQ5_0                                                            ? 16
                                                                                            : 8;
template <KvFormat kFormat, class Row>
FLASHPORT_DEVICE unsigned four_codes(const Row& row, int first) {
  constexpr KvFormatTrait kTrait = kv_format_trait(kFormat);
  const int begin = first / kTrait.block_values * kTrait.block_bytes + kTrait.scale_bytes;
  const int at = first % kTrait.block_values;
  if constexpr (kFormat == KvFormat::kInt8) {
    return row.word(first) ^ 0x80808080u;
  } else if constexpr (kFormat == KvFormat::kQ8_0) {
    return row.word(begin + at) ^ 0x80808080u;
  } else if constexpr (kFormat == KvFormat::kInt4) {
    const unsigned two = row.half(first / 2);
    const unsigned apart = (two | two << 8) & 0x00ff00ffu;
    return ((apart | apart << 4) & 0x0f0f0f0fu) ^ 0x08080808u;
  } else {
    constexpr int kHalf = kTrait.block_values / 2;
    constexpr bool kLong = kFormat == KvFormat::kQ5_0 || kFormat == KvFormat::kQ5_1;
    unsigned codes = row.word(begin + (kLong ? 4 : 0) + at % kHalf) >> at / kHalf * 4 & 0x0f0f0f0fu;
    if constexpr (kLong) codes |= fifth_bits(row.word(begin) >> at);
    return kFormat == KvFormat::kIq4Nl ? iq4_nl_bytes(codes) ^ 0x80808080u : codes;
  }
}

// What is stored as `first` to `first` + 3 of a row, exactly: of blocks, codes. `first` is a multiple of 4. Not for
// bf16.
template <KvFormat kFormat, class Row>
FLASHPORT_DEVICE Words2 stored_four(const Row& row, int first) {
  if constexpr (kFormat == KvFormat::kFp16) {
    return {row.word(2 * first), row.word(2 * first + 4)};
  } else if constexpr (kFormat == KvFormat::kFp8E4M3) {
    return widen_e4m3(row.word(first));
  } else if constexpr (kFormat == KvFormat::kFp8E4M3Fnuz) {
    return widen_e4m3fnuz(row.word(first));
  } else if constexpr (kFormat == KvFormat::kFp8E5M2) {
    const unsigned four = row.word(first);  // the upper halves of fp16
    return {pick_bytes<0x01040004>(0, four), pick_bytes<0x03040204>(0, four)};
  } else {
    return codes_as_halves<kMiddleCode<kFormat>>(four_codes<kFormat>(row, first));
  }
}

// The scale of the block that has value `first` of a row, and its minimum.
template <KvFormat kFormat, class Row>
FLASHPORT_DEVICE unsigned block_scale(const Row& row, int first) {
  constexpr KvFormatTrait kTrait = kv_format_trait(kFormat);
  return row.half(first / kTrait.block_values * kTrait.block_bytes);
}
template <KvFormat kFormat, class Row>
FLASHPORT_DEVICE unsigned block_minimum(const Row& row, int first) {
  constexpr KvFormatTrait kTrait = kv_format_trait(kFormat);
  return row.half(first / kTrait.block_values * kTrait.block_bytes + 2);
}

// Values `first` to `first` + 3 of a row as fp16.
template <KvFormat kFormat, class Row>
FLASHPORT_DEVICE Words2 widen_four(const Row& row, int first) {
  if constexpr (kFormat == KvFormat::kBf16) {
    return {bf16_to_halves(row.word(2 * first)), bf16_to_halves(row.word(2 * first + 4))};
  } else {
    const Words2 x = stored_four<kFormat>(row, first);
    if constexpr (!kInBlocks<kFormat>) return x;
    const unsigned scale = both_halves(block_scale<kFormat>(row, first));
    if constexpr (kHasMinimum<kFormat>) {
      const unsigned minimum = both_halves(block_minimum<kFormat>(row, first));
      return {fma_halves(x.x, scale, minimum), fma_halves(x.y, scale, minimum)};
    } else {
      return {multiply_halves(x.x, scale), multiply_halves(x.y, scale)};
    }
  }
}

// The same as floats, times `scale`.
struct FourFloats {
  Floats2 low, high;
};
template <KvFormat kFormat, class Row>
FLASHPORT_DEVICE FourFloats widen_to_floats(const Row& row, int first, float scale) {
  if constexpr (kFormat == KvFormat::kBf16) {
    const Floats2 low = bf16_to_floats(row.word(2 * first)), high = bf16_to_floats(row.word(2 * first + 4));
    return {Floats2{low.x * scale, low.y * scale}, Floats2{high.x * scale, high.y * scale}};
  } else {
    const Words2 x = stored_four<kFormat>(row, first);
    const Floats2 low = halves_to_floats(x.x), high = halves_to_floats(x.y);
    float base = 0.0f;
    if constexpr (kHasMinimum<kFormat>) base = half_to_float(block_minimum<kFormat>(row, first)) * scale;
    if constexpr (kInBlocks<kFormat>) scale *= half_to_float(block_scale<kFormat>(row, first));
    if constexpr (kHasMinimum<kFormat>) {
      return {Floats2{fma_rn(low.x, scale, base), fma_rn(low.y, scale, base)},
              Floats2{fma_rn(high.x, scale, base), fma_rn(high.y, scale, base)}};
    } else {
      return {Floats2{low.x * scale, low.y * scale}, Floats2{high.x * scale, high.y * scale}};
    }
  }
}

// A factor as the sum of two of fp16, each in both halves of a word, times a power of two: the product of one alone
// would be off by the factor's rounding, the same for all values of a row, and factors of fp8 e5m2 are often smaller
// than fp16's normal numbers.
struct Factor {
  unsigned high, low, power;
};
FLASHPORT_DEVICE unsigned half_twice(float x) { return both_halves(__builtin_bit_cast(std::uint16_t, to_half(x))); }
FLASHPORT_DEVICE Factor factor_of(float x) {
  constexpr unsigned kBit = 1u << 23, kLeast = (127u - 24) * kBit, kOne = 127u * kBit;
  const unsigned next = (__builtin_bit_cast(unsigned, x) & 0x7f800000u) + kBit;  // above |x|
  const unsigned power = next < kLeast ? kLeast : next > kOne ? kOne : next;
  const float rest = x * __builtin_bit_cast(float, 2 * kOne - power);  // below 1, where |x| is
  return {half_twice(rest), half_twice(rest - to_float(to_half(rest))), half_twice(__builtin_bit_cast(float, power))};
}
FLASHPORT_DEVICE unsigned multiply_halves(unsigned x, Factor factor) {
  using FLASHPORT_TARGET::multiply_halves;
  return multiply_halves(fma_halves(x, factor.high, multiply_halves(x, factor.low)), factor.power);
}

// Four values as the products of a kernel read them, in the math type, rounded to it once. kHasScale: times `scale`,
// which lies beside the cache.
template <MathType kMath, KvFormat kFormat, bool kHasScale, class Row>
FLASHPORT_DEVICE Words2 load_four(const Row& row, int first, float scale) {
  constexpr bool kIsOwn = kFormat == (kMath == MathType::kBf16 ? KvFormat::kBf16 : KvFormat::kFp16);
  if constexpr (kIsOwn && !kHasScale) {
    return {row.word(2 * first), row.word(2 * first + 4)};
  } else if constexpr (kMath == MathType::kBf16) {
    const FourFloats x = widen_to_floats<kFormat>(row, first, kHasScale ? scale : 1.0f);
    return {floats_to_bf16(x.low), floats_to_bf16(x.high)};
  } else if constexpr (!kHasScale) {
    return widen_four<kFormat>(row, first);
  } else if constexpr (kInBlocks<kFormat> || kFormat == KvFormat::kBf16) {
    const FourFloats x = widen_to_floats<kFormat>(row, first, scale);
    return {floats_to_halves(x.low), floats_to_halves(x.high)};
  } else {
    const Words2 x = stored_four<kFormat>(row, first);
    const Factor factor = factor_of(scale);
    return {multiply_halves(x.x, factor), multiply_halves(x.y, factor)};
  }
}

// f(Constant of the format), for those that GPUs read.
template <class F>
FLASHPORT_DEVICE void with_format(KvFormat format, const F& f) {
  switch (format) {
    case KvFormat::kBf16: f(Constant<KvFormat::kBf16>()); break;
    case KvFormat::kFp8E4M3: f(Constant<KvFormat::kFp8E4M3>()); break;
    case KvFormat::kFp8E4M3Fnuz: f(Constant<KvFormat::kFp8E4M3Fnuz>()); break;
    case KvFormat::kFp8E5M2: f(Constant<KvFormat::kFp8E5M2>()); break;
    case KvFormat::kInt8: f(Constant<KvFormat::kInt8>()); break;
    case KvFormat::kInt4: f(Constant<KvFormat::kInt4>()); break;
    case KvFormat::kQ8_0: f(Constant<KvFormat::kQ8_0>()); break;
    case KvFormat::kQ4_0: f(Constant<KvFormat::kQ4_0>()); break;
    case KvFormat::kQ4_1: f(Constant<KvFormat::kQ4_1>()); break;
    case KvFormat::kQ5_0: f(Constant<KvFormat::kQ5_0>()); break;
    case KvFormat::kQ5_1: f(Constant<KvFormat::kQ5_1>()); break;
    case KvFormat::kIq4Nl: f(Constant<KvFormat::kIq4Nl>()); break;
    default: f(Constant<KvFormat::kFp16>()); break;
  }
}

// Values 16 * unit to 16 * unit + 15 of a row.
template <KvFormat kFormat, class Row>
FLASHPORT_DEVICE void widen_unit(unsigned (&x)[8], const Row& row, int unit) {
  FLASHPORT_UNROLL(4)
  for (int i = 0; i < 4; ++i) {
    const Words2 two = widen_four<kFormat>(row, kUnitValues * unit + 4 * i);
    x[2 * i] = two.x;
    x[2 * i + 1] = two.y;
  }
}
template <class Row>
FLASHPORT_DEVICE void widen_unit(unsigned (&x)[8], KvFormat format, const Row& row, int unit) {
  with_format(format, [&](auto constant) FLASHPORT_INLINE {
    constexpr KvFormat kFormat = constant;
    widen_unit<kFormat>(x, row, unit);
  });
}

}  // namespace flashport::FLASHPORT_TARGET::kv
