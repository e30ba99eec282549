// The element type of K and V: how stored codes become 16-bit operands of a matrix instruction, in registers.
//
// 16-bit caches are operands as they are. Other codes are widened to fp16: four bytes of one register become two
// registers, in their order.
#pragma once

#include "common/device/kv/widen.h"
#include "hip/arch/fp8.h"
#include "hip/kv/stored_row.h"

namespace flashport::FLASHPORT_TARGET::kv {

FLASHPORT_DEVICE Words2 scale_halves(Words2 x, unsigned low, unsigned high) {
  return {as_word(as_half2(x.x) * as_half2(low)), as_word(as_half2(x.y) * as_half2(high))};
}

constexpr bool is_of_whole_numbers(KvFormat format) {
  return format == KvFormat::kQ8_0 || format == KvFormat::kInt8 || format == KvFormat::kQ4_0 ||
         format == KvFormat::kIq4Nl;
}

// Four codes of a stored word, a byte each, whole numbers less kMiddleCode; those of four bits are at `shift` in
// theirs.
template <KvFormat kFormat>
FLASHPORT_DEVICE unsigned code_bytes(unsigned word, unsigned shift) {
  if constexpr (!is_of_whole_numbers(kFormat)) {
    return word;
  } else if constexpr (code_bits(kFormat) == 8) {
    return word ^ 0x80808080u;
  } else {
    const unsigned codes = word >> shift & 0x0f0f0f0fu;
    return kFormat == KvFormat::kIq4Nl ? iq4_nl_bytes(codes) ^ 0x80808080u : codes;
  }
}

// Four code_bytes() as fp16, without their scale.
template <KvFormat kFormat>
FLASHPORT_DEVICE Words2 widen(unsigned four) {
  if constexpr (is_of_whole_numbers(kFormat)) {
    return codes_as_halves<kMiddleCode<kFormat>>(four);
  } else if constexpr (kFormat == KvFormat::kFp8E4M3) {
    return widen_e4m3(four);
  } else {
    static_assert(kFormat == KvFormat::kFp8E4M3Fnuz);
    return widen_e4m3fnuz(four);
  }
}

}  // namespace flashport::FLASHPORT_TARGET::kv
