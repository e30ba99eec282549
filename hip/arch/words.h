// Registers as vectors of words and of halves, and their bytes put together anew.
#pragma once

#include "hip/arch/global_memory.h"

namespace flashport::FLASHPORT_TARGET {

using Words2 = unsigned __attribute__((ext_vector_type(2)));
using Words4 = unsigned __attribute__((ext_vector_type(4)));
using Floats2 = float __attribute__((ext_vector_type(2)));
using Floats4 = float __attribute__((ext_vector_type(4)));
using Half2 = Half __attribute__((ext_vector_type(2)));

// Bytes of `high` (4 to 7) and `low` (0 to 3) in the order of the selector; 0x0c is a zero byte.
template <unsigned kSelector>
FLASHPORT_DEVICE unsigned pick_bytes(unsigned high, unsigned low) {
  return __builtin_amdgcn_perm(high, low, kSelector);
}
// The same by a selector that is not known before.
FLASHPORT_DEVICE unsigned pick_each(unsigned high, unsigned low, unsigned selector) {
  return __builtin_amdgcn_perm(high, low, selector);
}
template <unsigned kMask, unsigned kOnes>
FLASHPORT_DEVICE unsigned mask_and_set(unsigned x) {
  return (x & kMask) | kOnes;
}
// All bits of each byte that is 1; the others are 0. Products of 32 bits are slow; 0x0d in a selector is 0xff.
FLASHPORT_DEVICE unsigned bytes_of_ones(unsigned x) { return pick_each(0, 0, x | 0x0c0c0c0cu); }
// The low or the high halves of two registers, `first` in the low half.
FLASHPORT_DEVICE unsigned low_halves(unsigned first, unsigned second) { return pick_bytes<0x05040100>(second, first); }
FLASHPORT_DEVICE unsigned high_halves(unsigned first, unsigned second) { return pick_bytes<0x07060302>(second, first); }

// Rounds to nearest even. Good for every number, and for NaN as arithmetic makes it or bf16 holds it.
FLASHPORT_DEVICE unsigned round_to_bf16_bits(float x) {
  const unsigned bits = __builtin_bit_cast(unsigned, x);
  return bits + 0x7fffu + (bits >> 16 & 1u);
}

FLASHPORT_DEVICE Half2 as_half2(unsigned x) { return __builtin_bit_cast(Half2, x); }
FLASHPORT_DEVICE unsigned as_word(Half2 x) { return __builtin_bit_cast(unsigned, x); }
FLASHPORT_DEVICE unsigned add_halves(unsigned a, unsigned b) { return as_word(as_half2(a) + as_half2(b)); }
FLASHPORT_DEVICE unsigned multiply_halves(unsigned a, unsigned b) { return as_word(as_half2(a) * as_half2(b)); }
FLASHPORT_DEVICE unsigned fma_halves(unsigned a, unsigned b, unsigned c) {
  return as_word(__builtin_elementwise_fma(as_half2(a), as_half2(b), as_half2(c)));
}
FLASHPORT_DEVICE Floats2 halves_to_floats(unsigned two) { return __builtin_convertvector(as_half2(two), Floats2); }
FLASHPORT_DEVICE Floats2 bf16_to_floats(unsigned two) {
  return {__builtin_bit_cast(float, two << 16), __builtin_bit_cast(float, two & 0xffff0000u)};
}
FLASHPORT_DEVICE unsigned floats_to_bf16(Floats2 x) {
  return high_halves(round_to_bf16_bits(x.x), round_to_bf16_bits(x.y));
}
FLASHPORT_DEVICE unsigned floats_to_halves(Floats2 x) { return as_word(__builtin_convertvector(x, Half2)); }
FLASHPORT_DEVICE unsigned bf16_to_halves(unsigned two) { return floats_to_halves(bf16_to_floats(two)); }

}  // namespace flashport::FLASHPORT_TARGET
