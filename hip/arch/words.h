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

}  // namespace flashport::FLASHPORT_TARGET
