// In place of CUDA's own, for kernels that run on machine.h: the same names, but for those of word_verbs.h.
#pragma once

#include "cuda/arch/fp8.h"
#include "cuda/arch/mma.h"

namespace flashport::FLASHPORT_TARGET {

inline Words2 widen_e4m3(unsigned four) {
  Words2 x;
  widen_fp8(x.x, x.y, four);
  return x;
}
inline Words2 shift_e4m3fnuz(unsigned four) {
  const auto half = [&](int i) {
    const unsigned byte = four >> 8 * i & 0xff;
    return (byte & 0x80) << 8 | (byte & 0x7f) << 7;
  };
  return {half(0) | half(2) << 16, half(1) | half(3) << 16};
}
inline Words2 e4m3fnuz_nans(unsigned four) {
  const auto half = [&](int i) { return (four >> 8 * i & 0xff) == 0x80 ? 0xffffu : 0u; };
  return {half(0) | half(2) << 16, half(1) | half(3) << 16};
}
inline bool may_have_e4m3fnuz_nan(const unsigned (&words)[4]) {
  for (const unsigned x : words) {
    const Words2 nans = e4m3fnuz_nans(x);
    if (nans.x != 0 || nans.y != 0) return true;
  }
  return false;
}
inline Words2 widen_e4m3fnuz(unsigned four) {
  const auto half = [&](int i) {
    const unsigned byte = four >> 8 * i & 0xff;
    if (byte == 0x80) return 0xffffu;
    const auto bits = static_cast<std::uint16_t>((byte & 0x80) << 8 | (byte & 0x7f) << 7);
    return unsigned{std::bit_cast<std::uint16_t>(to_half(to_float(std::bit_cast<Half>(bits)) * 128.0f))};
  };
  return {half(0) | half(1) << 16, half(2) | half(3) << 16};
}

}  // namespace flashport::FLASHPORT_TARGET
