// Stored formats as the math type, in registers. Kernels of fp8 read e4m3 alone beside rows of the math type; kernels
// of bytes and more, whose math type is fp16, every format.
#pragma once

#include "common/device/attention/config.h"
#include "hip/kv/loaded_words.h"

namespace flashport::FLASHPORT_TARGET::attention {

// Four bytes of one register become two registers, in their order. Every e4m3 number is one of fp16 and of bf16.
template <MathType kMath>
FLASHPORT_DEVICE Words2 widen_e4m3(unsigned four) {
  if constexpr (kMath == MathType::kFp16) {
    return FLASHPORT_TARGET::widen_e4m3(four);
  } else {
    // The high half of a float is a bf16.
    Floats2 low, high;
    if constexpr (kConvertedFp8 == Fp8Form::kOcp) {
      low = __builtin_amdgcn_cvt_pk_f32_fp8(static_cast<int>(four), false);
      high = __builtin_amdgcn_cvt_pk_f32_fp8(static_cast<int>(four), true);
    } else {
      const Words2 halves = FLASHPORT_TARGET::widen_e4m3(four);
      low = halves_to_floats(halves[0]);
      high = halves_to_floats(halves[1]);
    }
    const auto pair = [](Floats2 x) FLASHPORT_INLINE {
      const Words2 bits = __builtin_bit_cast(Words2, x);
      return high_halves(bits[0], bits[1]);
    };
    return {pair(low), pair(high)};
  }
}

// Four values from `first` on.
template <MathType kMath, KvFormat kFormat, class Row>
FLASHPORT_DEVICE Words2 widen_four(const Row& row, int first) {
  if constexpr (kMath == MathType::kBf16) {
    static_assert(kFormat == KvFormat::kFp8E4M3);
    return widen_e4m3<kMath>(row.word(first));
  } else {
    return kv::widen_four<kFormat>(row, first);
  }
}

// f(Constant of the format), unless that is the math type's own.
template <KeySources kSources, class F>
FLASHPORT_DEVICE void with_other_format(KvFormat format, const F& f) {
  if constexpr (has(kSources, KeySources::kBytes)) {
    if (format != KvFormat::kFp16) kv::with_format(format, f);
  } else if constexpr (has(kSources, KeySources::kFp8)) {
    if (format == KvFormat::kFp8E4M3) f(Constant<KvFormat::kFp8E4M3>());
  }
}

}  // namespace flashport::FLASHPORT_TARGET::attention
