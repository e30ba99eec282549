// In place of CUDA's own, for kernels that run on machine.h: the same names.
#pragma once

#include "cuda/arch/mma.h"

namespace flashport::FLASHPORT_TARGET {

// A byte of e4m3 is an fp16 of which the exponent's first bit and the mantissa's last bits are missing, at 2^-8.
inline unsigned widen_e4m3_byte(unsigned byte) {
  if ((byte & 0x7f) == 0x7f) return 0x7fff;
  const auto half = static_cast<std::uint16_t>((byte & 0x80) << 8 | (byte & 0x7f) << 7);
  return std::bit_cast<std::uint16_t>(to_half(to_float(std::bit_cast<Half>(half)) * 256.0f));
}
inline void widen_fp8(unsigned& low, unsigned& high, unsigned four) {
  const auto two = [](unsigned bytes) {
    return widen_e4m3_byte(bytes & 0xff) | widen_e4m3_byte(bytes >> 8 & 0xff) << 16;
  };
  low = two(four);
  high = two(four >> 16);
}

}  // namespace flashport::FLASHPORT_TARGET
