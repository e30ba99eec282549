// Stored formats as the math type, in registers: a routine for each. Kernels of fp8 read e4m3 alone beside rows of the
// math type; kernels of bytes, whose math type is fp16, every format here.
#pragma once

#include "common/device/attention/config.h"
#include "common/device/core/constant.h"
#include "hip/kv/widen.h"

namespace flashport::FLASHPORT_TARGET::attention {

FLASHPORT_DEVICE Floats2 as_floats(unsigned halves) { return __builtin_convertvector(as_half2(halves), Floats2); }

// Four bytes of one register become two registers, in their order. Every e4m3 number is one of fp16 and of bf16.
template <MathType kMath>
FLASHPORT_DEVICE Words2 widen_e4m3(unsigned four) {
  if constexpr (kMath == MathType::kFp16) {
    return kv::widen<KvFormat::kFp8E4M3>(four);
  } else {
    // The high half of a float is a bf16.
    Floats2 low, high;
    if constexpr (kConvertedFp8 == Fp8Form::kOcp) {
      low = __builtin_amdgcn_cvt_pk_f32_fp8(static_cast<int>(four), false);
      high = __builtin_amdgcn_cvt_pk_f32_fp8(static_cast<int>(four), true);
    } else {
      const Words2 halves = kv::widen<KvFormat::kFp8E4M3>(four);
      low = as_floats(halves[0]);
      high = as_floats(halves[1]);
    }
    const auto pair = [](Floats2 x) FLASHPORT_INLINE {
      const Words2 bits = __builtin_bit_cast(Words2, x);
      return high_halves(bits[0], bits[1]);
    };
    return {pair(low), pair(high)};
  }
}

// Four values of fewer than 16 bits: their bytes and, in the low half of `scale`, what a block of them shares.
template <MathType kMath, KvFormat kFormat>
FLASHPORT_DEVICE Words2 widen_four(unsigned four, unsigned scale) {
  if constexpr (kFormat == KvFormat::kFp8E4M3) {
    return widen_e4m3<kMath>(four);
  } else {
    static_assert(kMath == MathType::kFp16);
    const Words2 halves = kv::widen<kFormat>(four);
    if constexpr (kFormat != KvFormat::kQ8_0) return halves;
    const unsigned scales = low_halves(scale, scale);
    return kv::scale_halves(halves, scales, scales);  // the product's one rounding
  }
}

constexpr bool is_wide(KvFormat format) { return format == KvFormat::kFp16 || format == KvFormat::kBf16; }

// f(Constant of the format), unless that is the math type's own.
template <KeySources kSources, class F>
FLASHPORT_DEVICE void with_other_format(KvFormat format, const F& f) {
  if constexpr (has(kSources, KeySources::kBytes)) {
    switch (format) {
      case KvFormat::kFp8E4M3: return f(Constant<KvFormat::kFp8E4M3>());
      case KvFormat::kFp8E4M3Fnuz: return f(Constant<KvFormat::kFp8E4M3Fnuz>());
      case KvFormat::kQ8_0: return f(Constant<KvFormat::kQ8_0>());
      case KvFormat::kBf16: return f(Constant<KvFormat::kBf16>());
      default: return;
    }
  } else if constexpr (has(kSources, KeySources::kFp8)) {
    if (format == KvFormat::kFp8E4M3) f(Constant<KvFormat::kFp8E4M3>());
  }
}

}  // namespace flashport::FLASHPORT_TARGET::attention
