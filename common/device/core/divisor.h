// Division by a number that is constant during a launch, as a multiplication and a shift.
#pragma once

#include <cstdint>

namespace flashport {

// What make_divisor() computes from `value`.
struct Divisor {
  std::uint32_t value, multiplier, shift;
};

// For every a below 2^31, a / value is the high half of 2a * multiplier, shifted right: the multiplier is
// ceil(2^(31 + shift) / value) with 2^shift >= value, so that its excess never reaches a quotient. There is no
// 64-bit shift, because it takes a GPU many registers.
[[nodiscard]] constexpr Divisor make_divisor(std::int64_t value) {
  std::uint32_t shift = 0;
  while ((std::int64_t{1} << shift) < value) ++shift;
  const std::uint64_t divisor = static_cast<std::uint64_t>(value);
  const std::uint64_t power = std::uint64_t{1} << (31 + shift);
  return {static_cast<std::uint32_t>(value), static_cast<std::uint32_t>((power + divisor - 1) / divisor), shift};
}

}  // namespace flashport
