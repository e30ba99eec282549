// Numbers of fp8 as wider ones.
#pragma once

#include FLASHPORT_TARGET_HEADER

namespace flashport::FLASHPORT_TARGET {

// Two e4m3 values in the low and two in the high half of `four`, exactly, as fp16.
FLASHPORT_DEVICE void widen_fp8(unsigned& low, unsigned& high, unsigned four) {
  asm("{\n"
      ".reg .b16 two, other_two;\n"
      "mov.b32 {two, other_two}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, two;\n"
      "cvt.rn.f16x2.e4m3x2 %1, other_two;\n"
      "}"
      : "=r"(low), "=r"(high)
      : "r"(four));
}

}  // namespace flashport::FLASHPORT_TARGET
