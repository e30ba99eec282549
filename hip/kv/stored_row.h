// Where the values of a row lie, in the formats that tiles read as stored: elements side by side, or blocks of 32 codes
// with an fp16 scale before them, at an even address (common/device/kv/blocks.h). A byte of q4_0 and iq4_nl holds a
// value in its low four bits and the one 16 further on in its high four.
#pragma once

#include "common/device/kv/format.h"
#include "hip/arch/block.h"

namespace flashport::FLASHPORT_TARGET::kv {

// Bits of one value, without what its block shares.
constexpr int code_bits(KvFormat format) {
  const KvFormatTrait trait = kv_format_trait(format);
  return 8 * (trait.block_bytes - trait.scale_bytes) / trait.block_values;
}
// Whether values are widened to fp16; else they are operands as they are.
constexpr bool is_widened(KvFormat format) { return code_bits(format) < 16; }
constexpr bool has_scales(KvFormat format) { return kv_format_trait(format).scale_bytes > 0; }

// Byte of a row that the value `at` is in, and that the scale of its block begins at.
template <KvFormat kFormat>
FLASHPORT_DEVICE constexpr int scale_byte(int at) {
  constexpr KvFormatTrait kTrait = kv_format_trait(kFormat);
  return at / kTrait.block_values * kTrait.block_bytes;
}
template <KvFormat kFormat>
FLASHPORT_DEVICE constexpr int element_byte(int at) {
  constexpr KvFormatTrait kTrait = kv_format_trait(kFormat);
  if constexpr (!has_scales(kFormat)) return at * kTrait.block_bytes;
  return scale_byte<kFormat>(at) + kTrait.scale_bytes + at % (kTrait.block_bytes - kTrait.scale_bytes);
}
// The lowest bit of the value in that byte.
template <KvFormat kFormat>
FLASHPORT_DEVICE constexpr unsigned element_shift(int at) {
  return code_bits(kFormat) == 4 ? static_cast<unsigned>(at) / 16 % 2 * 4 : 0;
}
// Byte of a row of factors, of fp16, that the one of the value `at` begins at.
FLASHPORT_DEVICE constexpr int factor_byte(int at) { return at / kFactoredValues * 2; }
static_assert(element_byte<KvFormat::kQ8_0>(40) == 34 + 2 + 8 && element_byte<KvFormat::kFp8E4M3>(40) == 40);
static_assert(element_byte<KvFormat::kQ4_0>(50) == 18 + 2 + 2 && element_shift<KvFormat::kQ4_0>(50) == 4);
static_assert(factor_byte(40) == 10);

}  // namespace flashport::FLASHPORT_TARGET::kv
