// e4m3 as the math type, exactly, in registers.
#pragma once

#include "common/device/core/types.h"
#include "hip/kv/widen.h"

namespace flashport::FLASHPORT_TARGET::attention {

// Four bytes of one register become two registers, in their order. Every e4m3 number is one of fp16 and of bf16.
template <MathType kMath>
FLASHPORT_DEVICE Words2 widen_e4m3(unsigned four) {
  if constexpr (kMath == MathType::kFp16) {
    return kv::widen<KvFormat::kFp8E4M3>(four);
  } else {
    // The high half of a float is a bf16.
    Floats2 low, high;
    if constexpr (kv::kNativeFp8 == KvFormat::kFp8E4M3) {
      low = __builtin_amdgcn_cvt_pk_f32_fp8(static_cast<int>(four), false);
      high = __builtin_amdgcn_cvt_pk_f32_fp8(static_cast<int>(four), true);
    } else {
      const Words2 halves = kv::widen<KvFormat::kFp8E4M3>(four);
      low = __builtin_convertvector(as_half2(halves[0]), Floats2);
      high = __builtin_convertvector(as_half2(halves[1]), Floats2);
    }
    const auto pair = [](Floats2 x) FLASHPORT_INLINE {
      const Words2 bits = __builtin_bit_cast(Words2, x);
      return high_halves(bits[0], bits[1]);
    };
    return {pair(low), pair(high)};
  }
}

}  // namespace flashport::FLASHPORT_TARGET::attention
