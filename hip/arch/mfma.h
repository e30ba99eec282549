// The matrix instruction of the tile verbs of CDNA: v_mfma_f32_16x16x16 of fp16 or bf16, in waves of 64.
//
// Fragments of D = A B + C, lane = 16 g + n (g 0..3, n 0..15):
//   A [16, 16]: row n, k = 4 g + 0..3          two registers of two 16-bit values
//   B [16, 16]: column n, k = 4 g + 0..3
//   C, D [16, 16]: column n, rows 4 g + 0..3   four registers
// So D, rounded, is a B operand whose k are D's rows: S^T = K Q^T feeds O^T = V^T P^T without an exchange of lanes.
//
// In 32x32 the lane is 32 h + n (h 0..1, n 0..31), and a product takes 16 k: two instructions of eight on CDNA3, one on
// CDNA4. Since the sum has no order that matters, A and B may hold any eight of the 16 k in lanes of h = 0, if both
// hold the same:
//   A [32, 16]: row n, eight k                 four registers of two 16-bit values
//   B [16, 32]: column n, the same eight k
//   C, D [32, 32]: column n, register 4 i + j is row 8 i + 4 h + j (i, j 0..3)
#pragma once

#include "common/device/core/types.h"
#include "hip/arch/lane_exchange.h"
#include "hip/arch/lane_maps.h"
#include "hip/arch/words.h"

namespace flashport::FLASHPORT_TARGET {

using Floats16 = float __attribute__((ext_vector_type(16)));

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

template <MathType kMath>
FLASHPORT_DEVICE void mfma(Floats16& c, Words4 a, Words4 b) {
  if constexpr (kHasWideMfma) {
    if constexpr (kMath == MathType::kBf16) {
      using Operand = BFloat16 __attribute__((ext_vector_type(8)));
      c = __builtin_amdgcn_mfma_f32_32x32x16_bf16(__builtin_bit_cast(Operand, a), __builtin_bit_cast(Operand, b), c, 0,
                                                  0, 0);
    } else {
      using Operand = Half __attribute__((ext_vector_type(8)));
      c = __builtin_amdgcn_mfma_f32_32x32x16_f16(__builtin_bit_cast(Operand, a), __builtin_bit_cast(Operand, b), c, 0,
                                                 0, 0);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const Words2 left = {a[i], a[i + 1]}, right = {b[i], b[i + 1]};
      if constexpr (kMath == MathType::kBf16) {
        using Operand = short __attribute__((ext_vector_type(4)));
        c = __builtin_amdgcn_mfma_f32_32x32x8bf16_1k(__builtin_bit_cast(Operand, left),
                                                     __builtin_bit_cast(Operand, right), c, 0, 0, 0);
      } else {
        using Operand = Half __attribute__((ext_vector_type(4)));
        c = __builtin_amdgcn_mfma_f32_32x32x8f16(__builtin_bit_cast(Operand, left), __builtin_bit_cast(Operand, right),
                                                 c, 0, 0, 0);
      }
    }
  }
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

// f of the values of two lanes that differ by 32, in the one order or the other.
template <class T, class F>
FLASHPORT_DEVICE T join_halves(T x, F&& f) {
  if constexpr (kHasPermlaneSwap) {
    const auto bits = __builtin_bit_cast(unsigned, x);
    const auto both = __builtin_amdgcn_permlane32_swap(bits, bits, false, false);
    const unsigned first = both[0], second = both[1];  // of an element of a vector clang 22 casts element 0
    return f(__builtin_bit_cast(T, first), __builtin_bit_cast(T, second));
  } else {
    return f(x, swap_32(x));
  }
}

}  // namespace flashport::FLASHPORT_TARGET
