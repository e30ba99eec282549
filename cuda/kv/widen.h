// Stored formats as fp16: a routine for each, which makes 16 neighbouring values of a row from its bytes in shared
// memory. A kernel that reads every format calls widen_unit(), and knows no format itself.
#pragma once

#include "common/device/core/types.h"
#include "common/device/kv/format.h"
#include "cuda/arch/fp8.h"
#include "cuda/arch/mma.h"

namespace flashport::FLASHPORT_TARGET::kv {

inline constexpr int kUnitValues = 16;

// Two registers of fp16 for the four bytes of one, in their order.
//
// FNUZ: a byte shifted into fp16's fields is 2^-7 of its value, subnormals included. The one NaN, code 0x80, becomes a
// half of ones.
FLASHPORT_DEVICE unsigned widen_e4m3fnuz_pair(unsigned high_bytes) {
  const unsigned shifted = (high_bytes & 0x80008000u) | (high_bytes >> 1 & 0x3f803f80u);
  return multiply_halves(shifted, 0x58005800u) | __vcmpeq2(high_bytes, 0x80008000u);
}
FLASHPORT_DEVICE void widen_e4m3fnuz(unsigned& low, unsigned& high, unsigned four) {
  low = widen_e4m3fnuz_pair(__byte_perm(four, 0, 0x1404));
  high = widen_e4m3fnuz_pair(__byte_perm(four, 0, 0x3424));
}
// int8, exactly: 0x6400 is 1024, in whose neighbourhood fp16 counts in ones.
FLASHPORT_DEVICE unsigned minus_1152(unsigned two) {
  const unsigned bias = 0x64806480u;
  const __half2 x = __hsub2(reinterpret_cast<const __half2&>(two), reinterpret_cast<const __half2&>(bias));
  return reinterpret_cast<const unsigned&>(x);
}
FLASHPORT_DEVICE void widen_int8(unsigned& low, unsigned& high, unsigned four) {
  const unsigned biased = four ^ 0x80808080u;
  low = minus_1152(__byte_perm(biased, 0x64646464u, 0x4140));
  high = minus_1152(__byte_perm(biased, 0x64646464u, 0x4342));
}

// `Row`: word(byte) are the four bytes from an even byte of the row on, half(byte) are two. The words after the row's
// last byte are there, and hold anything.
template <class Row>
FLASHPORT_DEVICE void widen_q8_0(unsigned (&x)[8], const Row& row, int unit) {
  constexpr KvFormatTrait kTrait = kv_format_trait(KvFormat::kQ8_0);
  constexpr int kUnits = kTrait.block_values / kUnitValues;
  const int block = unit / kUnits * kTrait.block_bytes;
  const int first = block + kTrait.scale_bytes + unit % kUnits * kUnitValues;
  const unsigned scale = row.half(block) * 0x10001u;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    widen_int8(x[2 * i], x[2 * i + 1], row.word(first + 4 * i));
    x[2 * i] = multiply_halves(x[2 * i], scale);  // the product's one rounding
    x[2 * i + 1] = multiply_halves(x[2 * i + 1], scale);
  }
}

// Formats of a byte a value, by the routine that widens four.
template <class Row, class Widen>
FLASHPORT_DEVICE void widen_bytes(unsigned (&x)[8], const Row& row, int unit, const Widen& widen) {
#pragma unroll
  for (int i = 0; i < 4; ++i) widen(x[2 * i], x[2 * i + 1], row.word(unit * kUnitValues + 4 * i));
}

// Whether a format has to be widened; the others are 16-bit types.
FLASHPORT_DEVICE bool is_narrow(KvFormat format) { return format != KvFormat::kFp16 && format != KvFormat::kBf16; }

// The values 16 * unit to 16 * unit + 15 of a row.
template <class Row>
FLASHPORT_DEVICE void widen_unit(unsigned (&x)[8], KvFormat format, const Row& row, int unit) {
  switch (format) {
    case KvFormat::kQ8_0: return widen_q8_0(x, row, unit);
    case KvFormat::kFp8E4M3Fnuz: return widen_bytes(x, row, unit, widen_e4m3fnuz);
    default: return widen_bytes(x, row, unit, widen_fp8);
  }
}

}  // namespace flashport::FLASHPORT_TARGET::kv
