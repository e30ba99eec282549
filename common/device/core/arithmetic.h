// Constants and functions of arithmetic that are the same on every target; block.h of a vendor adds overloads where an
// instruction does better.
#pragma once

#include <cstdint>

namespace flashport::FLASHPORT_TARGET {

inline constexpr float kInfinity = __builtin_huge_valf();
inline constexpr float kLog2e = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

template <class T>
FLASHPORT_DEVICE T minimum(T a, T b) {
  return b < a ? b : a;
}
template <class T>
FLASHPORT_DEVICE T maximum(T a, T b) {
  return a < b ? b : a;
}
// All 64 bits of a product of 32-bit numbers.
template <class T>
FLASHPORT_DEVICE std::uint64_t multiply_wide(T a, T b) {
  return std::uint64_t{a} * b;
}

}  // namespace flashport::FLASHPORT_TARGET
