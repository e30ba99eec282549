// Words of two halves or four bytes, and their parts put together anew.
#pragma once

#include "cuda/arch/fp8.h"
#include "cuda/arch/mma.h"

namespace flashport::FLASHPORT_TARGET {

using Words2 = uint2;
using Floats2 = float2;

// Bytes of `high` (4 to 7) and `low` (0 to 3) in the order of the selector's bytes.
template <unsigned kSelector>
FLASHPORT_DEVICE unsigned pick_bytes(unsigned high, unsigned low) {
  constexpr unsigned kNibbles =
      (kSelector & 7u) | (kSelector >> 4 & 0x70u) | (kSelector >> 8 & 0x700u) | (kSelector >> 12 & 0x7000u);
  return __byte_perm(low, high, kNibbles);
}
// The same by a selector that is not known before.
FLASHPORT_DEVICE unsigned pick_each(unsigned high, unsigned low, unsigned selector) {
  return __byte_perm(low, high, __byte_perm(selector | selector >> 4, 0, 0x4420));
}
// By a selector of four nibbles below 8.
FLASHPORT_DEVICE unsigned pick_nibbles(unsigned high, unsigned low, unsigned selector) {
  unsigned picked;  // __byte_perm would mask the selector
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(picked) : "r"(low), "r"(high), "r"(selector));
  return picked;
}

// (x & kMask) | kOnes, as one instruction: with two constants the compiler makes two.
template <unsigned kMask, unsigned kOnes>
FLASHPORT_DEVICE unsigned mask_and_set(unsigned x) {
  unsigned ones, y;
  asm("mov.b32 %0, %1;" : "=r"(ones) : "n"(kOnes));
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(y) : "r"(x), "n"(kMask), "r"(ones));
  return y;
}

// Bits of a where kMask has ones, and of b elsewhere, as one instruction.
template <unsigned kMask>
FLASHPORT_DEVICE unsigned select_bits(unsigned a, unsigned b) {
  unsigned x;
  asm("lop3.b32 %0, %1, %2, %3, 0xe4;" : "=r"(x) : "r"(a), "r"(b), "n"(kMask));
  return x;
}

// All bits of each byte that is 1; the others are 0.
FLASHPORT_DEVICE unsigned bytes_of_ones(unsigned x) { return x * 0xffu; }

FLASHPORT_DEVICE __half2 as_half2(unsigned x) { return reinterpret_cast<const __half2&>(x); }
FLASHPORT_DEVICE unsigned as_word(__half2 x) { return reinterpret_cast<const unsigned&>(x); }
FLASHPORT_DEVICE unsigned add_halves(unsigned a, unsigned b) { return as_word(__hadd2_rn(as_half2(a), as_half2(b))); }
FLASHPORT_DEVICE unsigned fma_halves(unsigned a, unsigned b, unsigned c) {
  return as_word(__hfma2(as_half2(a), as_half2(b), as_half2(c)));
}
// -(a b + c): the signs cost no instruction.
FLASHPORT_DEVICE unsigned minus_fma_halves(unsigned a, unsigned b, unsigned c) {
  return as_word(__hfma2(__hneg2(as_half2(a)), as_half2(b), __hneg2(as_half2(c))));
}
FLASHPORT_DEVICE __nv_bfloat162 as_bf162(unsigned x) { return reinterpret_cast<const __nv_bfloat162&>(x); }
FLASHPORT_DEVICE unsigned as_word(__nv_bfloat162 x) { return reinterpret_cast<const unsigned&>(x); }
FLASHPORT_DEVICE unsigned subtract_bf16(unsigned a, unsigned b) {
  return as_word(__hsub2_rn(as_bf162(a), as_bf162(b)));
}
FLASHPORT_DEVICE unsigned multiply_bf16(unsigned a, unsigned b) {
  return as_word(__hmul2_rn(as_bf162(a), as_bf162(b)));
}
FLASHPORT_DEVICE unsigned fma_bf16(unsigned a, unsigned b, unsigned c) {
  return as_word(__hfma2(as_bf162(a), as_bf162(b), as_bf162(c)));
}
FLASHPORT_DEVICE Floats2 halves_to_floats(unsigned two) { return __half22float2(as_half2(two)); }
FLASHPORT_DEVICE Floats2 bf16_to_floats(unsigned two) {
  return {__uint_as_float(two << 16), __uint_as_float(two & 0xffff0000u)};
}
FLASHPORT_DEVICE unsigned floats_to_bf16(Floats2 x) { return pack<MathType::kBf16>(x.x, x.y); }
FLASHPORT_DEVICE unsigned floats_to_halves(Floats2 x) { return pack<MathType::kFp16>(x.x, x.y); }
FLASHPORT_DEVICE unsigned bf16_to_halves(unsigned two) { return floats_to_halves(bf16_to_floats(two)); }

// Four bytes of fp8 as halves, in their order, exactly.
FLASHPORT_DEVICE Words2 widen_e4m3(unsigned four) {
  Words2 x;
  widen_fp8(x.x, x.y, four);
  return x;
}
// FNUZ codes 0 and 2 of four, and 1 and 3, as halves of 2^-7 of their values: bits that are shifted, subnormals
// included. The one NaN, code 0x80, becomes -0.
FLASHPORT_DEVICE Words2 shift_e4m3fnuz(unsigned four) {
  return {(four << 8 & 0x80008000u) | (four << 7 & 0x3f803f80u), (four & 0x80008000u) | (four >> 1 & 0x3f803f80u)};
}
// All bits of the halves of shift_e4m3fnuz() that stand for NaN.
FLASHPORT_DEVICE Words2 e4m3fnuz_nans(unsigned four) {
  const unsigned bytes = __vcmpeq4(four, 0x80808080u);
  return {__byte_perm(bytes, 0, 0x2200), __byte_perm(bytes, 0, 0x3311)};
}
// Whether one of 16 codes is NaN, and seldom also if none is: of 0x80 alone the highest bit goes with the 1 that is
// taken off, but for what the byte below borrows.
FLASHPORT_DEVICE bool may_have_e4m3fnuz_nan(const unsigned (&words)[4]) {
  unsigned found = 0;
  for (const unsigned x : words) found |= x & ~(x - 0x01010101u);
  return (found & 0x80808080u) != 0;
}
FLASHPORT_DEVICE Words2 widen_e4m3fnuz(unsigned four) {
  const unsigned crossed = __byte_perm(four, 0, 0x3120);
  const Words2 x = shift_e4m3fnuz(crossed), nans = e4m3fnuz_nans(crossed);
  return {multiply_halves(x.x, 0x58005800u) | nans.x, multiply_halves(x.y, 0x58005800u) | nans.y};
}

}  // namespace flashport::FLASHPORT_TARGET
