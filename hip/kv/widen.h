// The element type of K and V: how stored bytes become 16-bit operands of a matrix instruction, in registers.
//
// 16-bit caches are operands as they are. Byte caches (fp8, q8_0) are widened to fp16: four bytes of one register
// become two registers, in their order. A q8_0 block is an fp16 scale, then 32 int8: 34 bytes, at an even address.
#pragma once

#include "common/device/kv/format.h"
#include "hip/arch/fp8.h"

namespace flashport::FLASHPORT_TARGET::kv {

inline constexpr int kQ8Values = kv_format_trait(KvFormat::kQ8_0).block_values;
inline constexpr int kQ8Bytes = kv_format_trait(KvFormat::kQ8_0).block_bytes;

constexpr bool is_byte_format(KvFormat format) {
  return format == KvFormat::kFp8E4M3 || format == KvFormat::kFp8E4M3Fnuz || format == KvFormat::kQ8_0;
}

// Byte of element `at` in a row; in q8_0 the scale of an element is at scale_byte.
template <KvFormat kFormat>
FLASHPORT_DEVICE constexpr int element_byte(int at) {
  if constexpr (kFormat == KvFormat::kQ8_0) return at / kQ8Values * kQ8Bytes + 2 + at % kQ8Values;
  return is_byte_format(kFormat) ? at : 2 * at;
}
FLASHPORT_DEVICE constexpr int scale_byte(int at) { return at / kQ8Values * kQ8Bytes; }

// Four int8, exactly, without their scale: 0x6400 is 1024, in whose neighbourhood fp16 counts in ones.
FLASHPORT_DEVICE Words2 widen_int8(unsigned four) {
  const unsigned biased = four ^ 0x80808080u;
  const Half2 bias{1152.0f16, 1152.0f16};
  return {as_word(as_half2(pick_bytes<0x04010400>(0x64646464u, biased)) - bias),
          as_word(as_half2(pick_bytes<0x04030402>(0x64646464u, biased)) - bias)};
}

FLASHPORT_DEVICE Words2 scale_halves(Words2 x, unsigned low, unsigned high) {
  return {as_word(as_half2(x.x) * as_half2(low)), as_word(as_half2(x.y) * as_half2(high))};
}

// Four bytes of a cache's format as fp16; int8 without their scale.
template <KvFormat kFormat>
FLASHPORT_DEVICE Words2 widen(unsigned four) {
  if constexpr (kFormat == KvFormat::kQ8_0) {
    return widen_int8(four);
  } else if constexpr (kFormat == KvFormat::kFp8E4M3) {
    return widen_e4m3(four);
  } else {
    static_assert(kFormat == KvFormat::kFp8E4M3Fnuz);
    return widen_e4m3fnuz(four);
  }
}

}  // namespace flashport::FLASHPORT_TARGET::kv
