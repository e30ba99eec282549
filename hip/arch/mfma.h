// The matrix instruction of the tile verbs of CDNA: v_mfma_f32_16x16x16 of fp16 or bf16, in waves of 64.
//
// Fragments of D = A B + C, lane = 16 g + n (g 0..3, n 0..15):
//   A [16, 16]: row n, k = 4 g + 0..3          two registers of two 16-bit values
//   B [16, 16]: column n, k = 4 g + 0..3
//   C, D [16, 16]: column n, rows 4 g + 0..3   four registers
// So D, rounded, is a B operand whose k are D's rows: S^T = K Q^T feeds O^T = V^T P^T without an exchange of lanes.
#pragma once

#include "common/device/core/types.h"
#include "hip/arch/lane_exchange.h"
#include "hip/arch/lane_maps.h"
#include "hip/arch/words.h"

namespace flashport::FLASHPORT_TARGET {

using Floats4 = float __attribute__((ext_vector_type(4)));

template <MathType kMath>
FLASHPORT_DEVICE void mfma(Floats4& c, Words2 a, Words2 b) {
  if constexpr (kMath == MathType::kBf16) {
    using Operand = short __attribute__((ext_vector_type(4)));
    c = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(__builtin_bit_cast(Operand, a), __builtin_bit_cast(Operand, b), c, 0,
                                                  0, 0);
  } else {
    using Operand = Half __attribute__((ext_vector_type(4)));
    c = __builtin_amdgcn_mfma_f32_16x16x16f16(__builtin_bit_cast(Operand, a), __builtin_bit_cast(Operand, b), c, 0, 0,
                                              0);
  }
}

// Rounds to nearest even. Good for every number, and for NaN as arithmetic makes it or bf16 holds it.
FLASHPORT_DEVICE unsigned round_to_bf16_bits(float x) {
  const unsigned bits = __builtin_bit_cast(unsigned, x);
  return bits + 0x7fffu + (bits >> 16 & 1u);
}

// Two floats as a register of the math type, the first in the low half.
template <MathType kMath>
FLASHPORT_DEVICE unsigned pack(float low, float high) {
  if constexpr (kMath == MathType::kBf16 && kConvertsToBf16) {
    using BFloat16x2 = BFloat16 __attribute__((ext_vector_type(2)));
    return __builtin_bit_cast(unsigned, BFloat16x2{to_bfloat16(low), to_bfloat16(high)});
  } else if constexpr (kMath == MathType::kBf16) {
    return high_halves(round_to_bf16_bits(low), round_to_bf16_bits(high));
  } else {
    return as_word(Half2{to_half(low), to_half(high)});
  }
}

}  // namespace flashport::FLASHPORT_TARGET
