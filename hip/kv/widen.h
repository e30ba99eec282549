// The element type of K and V: how stored codes become 16-bit operands of a matrix instruction, in registers.
//
// 16-bit caches are operands as they are. Other codes are widened to fp16: four bytes of one register become two
// registers, in their order; the bytes of q4_0 are its codes, one each.
#pragma once

#include "common/device/kv/widen.h"
#include "hip/arch/fp8.h"
#include "hip/kv/stored_row.h"

namespace flashport::FLASHPORT_TARGET::kv {

FLASHPORT_DEVICE Words2 scale_halves(Words2 x, unsigned low, unsigned high) {
  return {as_word(as_half2(x.x) * as_half2(low)), as_word(as_half2(x.y) * as_half2(high))};
}

// Four codes as fp16, without their scale.
template <KvFormat kFormat>
FLASHPORT_DEVICE Words2 widen(unsigned four) {
  if constexpr (kFormat == KvFormat::kQ8_0 || kFormat == KvFormat::kInt8) {
    return codes_as_halves<kMiddleCode<kFormat>>(four ^ 0x80808080u);
  } else if constexpr (kFormat == KvFormat::kQ4_0) {
    return codes_as_halves<kMiddleCode<kFormat>>(four);
  } else if constexpr (kFormat == KvFormat::kIq4Nl) {
    return codes_as_halves<kMiddleCode<kFormat>>(iq4_nl_bytes(four) ^ 0x80808080u);
  } else if constexpr (kFormat == KvFormat::kFp8E4M3) {
    return widen_e4m3(four);
  } else {
    static_assert(kFormat == KvFormat::kFp8E4M3Fnuz);
    return widen_e4m3fnuz(four);
  }
}

}  // namespace flashport::FLASHPORT_TARGET::kv
