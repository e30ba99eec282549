// Numbers of fp8 as fp16: four bytes of one register become two registers, in their order, exactly.
#pragma once

#include "hip/arch/words.h"

namespace flashport::FLASHPORT_TARGET {

// By the conversion instructions. A template, as not every target has them.
template <class Word>
FLASHPORT_DEVICE Words2 convert_fp8(Word four) {
  const auto low = __builtin_amdgcn_cvt_pk_f32_fp8(static_cast<int>(four), false);
  const auto high = __builtin_amdgcn_cvt_pk_f32_fp8(static_cast<int>(four), true);
  return {__builtin_bit_cast(unsigned, __builtin_amdgcn_cvt_pkrtz(low[0], low[1])),
          __builtin_bit_cast(unsigned, __builtin_amdgcn_cvt_pkrtz(high[0], high[1]))};
}

// Two e4m3 bytes, each in the high byte of a half. Shifted into fp16's fields they are 2^-8 of their value, subnormals
// included; 140 is what takes NaN's code, 480 if it were a number, to infinity and 448, the largest number, not.
FLASHPORT_DEVICE unsigned widen_e4m3_pair(unsigned high_bytes) {
  using Short2 = short __attribute__((ext_vector_type(2)));
  const Short2 shifted = __builtin_bit_cast(Short2, high_bytes) >> 1;
  const Half2 x = as_half2(__builtin_bit_cast(unsigned, shifted) & 0xbfffbfffu);
  const Half2 overflows = x * Half2{140.0f16 * 256.0f16, 140.0f16 * 256.0f16};
  return as_word(__builtin_elementwise_fma(overflows, Half2{0.0f16, 0.0f16}, x * Half2{256.0f16, 256.0f16}));
}
template <class Word>
FLASHPORT_DEVICE Words2 widen_e4m3(Word four) {
  if constexpr (kConvertedFp8 == Fp8Form::kOcp) {
    return convert_fp8(four);
  } else {
    return {widen_e4m3_pair(pick_bytes<0x010c000c>(0, four)), widen_e4m3_pair(pick_bytes<0x030c020c>(0, four))};
  }
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
template <class Word>
FLASHPORT_DEVICE Words2 widen_e4m3fnuz(Word four) {
  if constexpr (kConvertedFp8 == Fp8Form::kFnuz) {
    return convert_fp8(four);
  } else {
    return {widen_e4m3fnuz_pair(pick_bytes<0x010c000c>(0, four)), widen_e4m3fnuz_pair(pick_bytes<0x030c020c>(0, four))};
  }
}

}  // namespace flashport::FLASHPORT_TARGET
