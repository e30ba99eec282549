// Division by a Divisor on the device.
#pragma once

#include "common/device/core/divisor.h"
#include FLASHPORT_TARGET_HEADER

namespace flashport::FLASHPORT_TARGET {

FLASHPORT_DEVICE int divide(int a, const Divisor& b) {
  const std::uint64_t product = std::uint64_t{2 * static_cast<std::uint32_t>(a)} * b.multiplier;
  return static_cast<int>(static_cast<std::uint32_t>(product >> 32) >> b.shift);
}

}  // namespace flashport::FLASHPORT_TARGET
