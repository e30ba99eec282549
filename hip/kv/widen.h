// The element type of K and V: how stored bytes become 16-bit operands of a matrix instruction, in registers.
//
// 16-bit caches are operands as they are. Byte caches (fp8, q8_0) are widened to fp16: four bytes of one register
// become two registers, in their order. A q8_0 block is an fp16 scale, then 32 int8: 34 bytes, at an even address.
#pragma once

#include "common/device/kv/format.h"
#include "hip/arch/words.h"

namespace flashport::FLASHPORT_TARGET::kv {

inline constexpr int kQ8Values = kv_format_trait(KvFormat::kQ8_0).block_values;
inline constexpr int kQ8Bytes = kv_format_trait(KvFormat::kQ8_0).block_bytes;

constexpr bool is_byte_format(KvFormat format) {
  return format == KvFormat::kFp8E4M3 || format == KvFormat::kFp8E4M3Fnuz || format == KvFormat::kQ8_0;
}

// Byte of element `at` in a row; in q8_0 the scale of an element is at scale_byte.
template <KvFormat kFormat>
FLASHPORT_DEVICE constexpr int element_byte(int at) {
  if constexpr (kFormat == KvFormat::kQ8_0) return at / kQ8Values * kQ8Bytes + 2 + at % kQ8Values;
  return is_byte_format(kFormat) ? at : 2 * at;
}
FLASHPORT_DEVICE constexpr int scale_byte(int at) { return at / kQ8Values * kQ8Bytes; }

// Two e4m3 bytes, each in the high byte of a half. Shifted into fp16's fields they are 2^-8 of their value, subnormals
// included; 140 is what takes NaN's code, 480 if it were a number, to infinity and 448, the largest number, not.
FLASHPORT_DEVICE unsigned widen_e4m3_pair(unsigned high_bytes) {
  using Short2 = short __attribute__((ext_vector_type(2)));
  const Short2 shifted = __builtin_bit_cast(Short2, high_bytes) >> 1;
  const Half2 x = as_half2(__builtin_bit_cast(unsigned, shifted) & 0xbfffbfffu);
  const Half2 overflows = x * Half2{140.0f16 * 256.0f16, 140.0f16 * 256.0f16};
  return as_word(__builtin_elementwise_fma(overflows, Half2{0.0f16, 0.0f16}, x * Half2{256.0f16, 256.0f16}));
}
FLASHPORT_DEVICE Words2 widen_e4m3(unsigned four) {
  return {widen_e4m3_pair(pick_bytes<0x010c000c>(0, four)), widen_e4m3_pair(pick_bytes<0x030c020c>(0, four))};
}

// The same of FNUZ: values are 2^-7 of theirs, and the one NaN, code 0x80, becomes a half of ones.
FLASHPORT_DEVICE unsigned widen_e4m3fnuz_pair(unsigned high_bytes) {
  using Short2 = short __attribute__((ext_vector_type(2)));
  using UShort2 = unsigned short __attribute__((ext_vector_type(2)));
  const Short2 shifted = __builtin_bit_cast(Short2, high_bytes) >> 1;
  const Half2 x = as_half2(__builtin_bit_cast(unsigned, shifted) & 0xbfffbfffu) * Half2{128.0f16, 128.0f16};
  const UShort2 zero_if_nan = __builtin_bit_cast(UShort2, high_bytes ^ 0x80008000u);
  const UShort2 ones_if_nan = __builtin_elementwise_min(zero_if_nan, UShort2{1, 1}) - UShort2{1, 1};
  return as_word(x) | __builtin_bit_cast(unsigned, ones_if_nan);
}
FLASHPORT_DEVICE Words2 widen_e4m3fnuz(unsigned four) {
  return {widen_e4m3fnuz_pair(pick_bytes<0x010c000c>(0, four)), widen_e4m3fnuz_pair(pick_bytes<0x030c020c>(0, four))};
}

// Four int8, exactly, without their scale: 0x6400 is 1024, in whose neighbourhood fp16 counts in ones.
FLASHPORT_DEVICE Words2 widen_int8(unsigned four) {
  const unsigned biased = four ^ 0x80808080u;
  const Half2 bias{1152.0f16, 1152.0f16};
  return {as_word(as_half2(pick_bytes<0x04010400>(0x64646464u, biased)) - bias),
          as_word(as_half2(pick_bytes<0x04030402>(0x64646464u, biased)) - bias)};
}

FLASHPORT_DEVICE Words2 scale_halves(Words2 x, unsigned low, unsigned high) {
  return {as_word(as_half2(x.x) * as_half2(low)), as_word(as_half2(x.y) * as_half2(high))};
}

// What the conversion instructions read.
inline constexpr KvFormat kNativeFp8 = kConvertsFnuz ? KvFormat::kFp8E4M3Fnuz : KvFormat::kFp8E4M3;

// Four bytes of a cache's format as fp16; int8 without their scale.
template <KvFormat kFormat>
FLASHPORT_DEVICE Words2 widen(unsigned four) {
  if constexpr (kFormat == KvFormat::kQ8_0) {
    return widen_int8(four);
  } else if constexpr (kFormat == kNativeFp8) {
    const auto low = __builtin_amdgcn_cvt_pk_f32_fp8(static_cast<int>(four), false);
    const auto high = __builtin_amdgcn_cvt_pk_f32_fp8(static_cast<int>(four), true);
    return {__builtin_bit_cast(unsigned, __builtin_amdgcn_cvt_pkrtz(low[0], low[1])),
            __builtin_bit_cast(unsigned, __builtin_amdgcn_cvt_pkrtz(high[0], high[1]))};
  } else if constexpr (kFormat == KvFormat::kFp8E4M3) {
    return widen_e4m3(four);
  } else {
    static_assert(kFormat == KvFormat::kFp8E4M3Fnuz);
    return widen_e4m3fnuz(four);
  }
}

}  // namespace flashport::FLASHPORT_TARGET::kv
