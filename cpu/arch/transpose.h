// The transpose of kVecWidth x kVecWidth elements of 32 bits.
#pragma once

#include <utility>

#include FLASHPORT_TARGET_HEADER

namespace flashport::FLASHPORT_TARGET {

// Exchanges the blocks of kSize x kSize elements beside the diagonal, of two rows that are kSize apart.
template <int kSize, int... kLane>
FLASHPORT_DEVICE void exchange_blocks(Vec& a, Vec& b, std::integer_sequence<int, kLane...>) {
  const Vec upper = __builtin_shufflevector(a, b, ((kLane & kSize) == 0 ? kLane : kVecWidth + kLane - kSize)...);
  const Vec lower = __builtin_shufflevector(a, b, ((kLane & kSize) == 0 ? kLane + kSize : kVecWidth + kLane)...);
  a = upper;
  b = lower;
}

template <int kSize>
FLASHPORT_DEVICE void transpose_step(Vec (&x)[kVecWidth]) {
#pragma GCC unroll 16
  for (int i = 0; i < kVecWidth; ++i) {
    if ((i & kSize) == 0) exchange_blocks<kSize>(x[i], x[i + kSize], std::make_integer_sequence<int, kVecWidth>());
  }
}

FLASHPORT_DEVICE void transpose(Vec (&x)[kVecWidth]) {
  if constexpr (kVecWidth == 16) transpose_step<8>(x);
  transpose_step<4>(x);
  transpose_step<2>(x);
  transpose_step<1>(x);
}

}  // namespace flashport::FLASHPORT_TARGET
