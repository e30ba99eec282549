// The instructions of the tile verbs of RDNA3: WMMA 16x16x16 of wave32, the exchange between the halves of a wave.
//
// Fragments of D = A B + C, lane = 16 * h + n (h 0..1, n 0..15), operands replicated over both halves:
//   A [16, 16]: row n, element k is 16-bit value k of eight registers
//   B [16, 16]: column n, element k is 16-bit value k
//   C, D [16, 16]: column n; register r holds row 2 r + h
#pragma once

#include <type_traits>

#include "common/device/core/types.h"
#include "hip/arch/lane_maps.h"
#include "hip/arch/words.h"

namespace flashport::FLASHPORT_TARGET {

using Words8 = unsigned __attribute__((ext_vector_type(8)));
using Floats8 = float __attribute__((ext_vector_type(8)));

// Set to zero where it is needed: the compiler would keep a constant in eight scalar registers.
FLASHPORT_DEVICE Floats8 zero_tile() {
  Floats8 c = {};
  asm volatile("" : "+v"(c));
  return c;
}

template <MathType kMath>
FLASHPORT_DEVICE Floats8 wmma(Words8 a, Words8 b, Floats8 c) {
  if constexpr (kMath == MathType::kBf16) {
    using Operand = short __attribute__((ext_vector_type(16)));
    return __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32(__builtin_bit_cast(Operand, a), __builtin_bit_cast(Operand, b),
                                                       c);
  } else {
    using Operand = _Float16 __attribute__((ext_vector_type(16)));
    return __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(__builtin_bit_cast(Operand, a), __builtin_bit_cast(Operand, b),
                                                      c);
  }
}

// The value of the lane with the same n in the other half.
FLASHPORT_DEVICE unsigned other_half(unsigned x) {
  return __builtin_amdgcn_permlanex16(x, x, 0x76543210u, 0xfedcba98u, false, false);
}
FLASHPORT_DEVICE float other_half(float x) {
  return __builtin_bit_cast(float, other_half(__builtin_bit_cast(unsigned, x)));
}
// f of the values of the two lanes with the same n, in the one order or the other.
template <class T, class F>
FLASHPORT_DEVICE T join_halves(T x, F&& f) {
  return f(x, other_half(x));
}
// The value of lane `n` of this lane's half.
FLASHPORT_DEVICE unsigned from_lane(unsigned x, int n) {
  const unsigned select = 0x11111111u * static_cast<unsigned>(n);
  return __builtin_amdgcn_permlane16(x, x, select, select, false, false);
}

// Keeps products that give `c` before this point and later loads after it: loads that the compiler moved up would need
// registers that are not free.
FLASHPORT_DEVICE void keep_order(Floats8& c) { asm volatile("" : "+v"(c)::"memory"); }

// Two floats as a register of the math type, the first in the low half.
template <MathType kMath>
FLASHPORT_DEVICE unsigned pack(float low, float high) {
  using Element = std::conditional_t<kMath == MathType::kBf16, BFloat16, Half>;
  using Two = Element __attribute__((ext_vector_type(2)));
  return __builtin_bit_cast(unsigned, Two{static_cast<Element>(low), static_cast<Element>(high)});
}

// Keeps the computation of addresses from `pointer` after this point, so that few of them are in registers at a time.
FLASHPORT_DEVICE void keep_order(GlobalBytes& pointer) { asm volatile("" : "+v"(pointer)::"memory"); }

FLASHPORT_DEVICE GlobalBytes from_lane(GlobalBytes pointer, int n) {
  const auto bits = reinterpret_cast<std::uint64_t>(pointer);
  const unsigned low = from_lane(static_cast<unsigned>(bits), n);
  const unsigned high = from_lane(static_cast<unsigned>(bits >> 32), n);
  return reinterpret_cast<GlobalBytes>(std::uint64_t{high} << 32 | low);
}

}  // namespace flashport::FLASHPORT_TARGET
