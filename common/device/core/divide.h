// Division by a Divisor on the device.
#pragma once

#include "common/device/core/divisor.h"
#include FLASHPORT_TARGET_HEADER

namespace flashport::FLASHPORT_TARGET {

FLASHPORT_DEVICE int divide(int a, const Divisor& b) {
  const std::uint64_t product = std::uint64_t{2 * static_cast<std::uint32_t>(a)} * b.multiplier;
  return static_cast<int>(static_cast<std::uint32_t>(product >> 32) >> b.shift);
}

// The same by a number that only the device knows, where the quotient is below 2^20: `inverse` is 1 / b to within a few
// units in the last place, so that what it gives is off by one at most.
FLASHPORT_DEVICE int divide(int a, int b, float inverse) {
  int quotient = static_cast<int>(static_cast<float>(a) * inverse);
  const int rest = a - quotient * b;
  quotient -= rest < 0 ? 1 : 0;
  return quotient + (rest >= b ? 1 : 0);
}

}  // namespace flashport::FLASHPORT_TARGET
