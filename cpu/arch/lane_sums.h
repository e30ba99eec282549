// Sums and maxima over the elements of vectors, in a fixed order.
#pragma once

#include <utility>

#include FLASHPORT_TARGET_HEADER

namespace flashport::FLASHPORT_TARGET {

// One step of fold_each(): runs of `kHalf` elements from two vectors, combined pairwise by f and interleaved.
template <int kHalf, class F, int... kLane>
FLASHPORT_DEVICE Vec fold_lanes(Vec a, Vec b, const F& f, std::integer_sequence<int, kLane...>) {
  constexpr auto pick = [](int lane, int offset) {
    const int group = lane / kHalf;
    return (group % 2 == 0 ? 0 : kVecWidth) + group / 2 * 2 * kHalf + offset + lane % kHalf;
  };
  return f(__builtin_shufflevector(a, b, pick(kLane, 0)...), __builtin_shufflevector(a, b, pick(kLane, kHalf)...));
}

template <int kDistance, int... kLane>
FLASHPORT_DEVICE Vec swap_lanes(Vec x, std::integer_sequence<int, kLane...>) {
  return __builtin_shufflevector(x, x, (kLane ^ kDistance)...);
}

// All elements combined by f, in a fixed order.
template <class F>
FLASHPORT_DEVICE float fold_vec(Vec x, const F& f) {
  constexpr auto lanes = std::make_integer_sequence<int, kVecWidth>();
  if constexpr (kVecWidth == 16) x = f(x, swap_lanes<8>(x, lanes));
  x = f(x, swap_lanes<4>(x, lanes));
  x = f(x, swap_lanes<2>(x, lanes));
  return f(x, swap_lanes<1>(x, lanes))[0];
}

// Element i of the result is the elements of x[i], combined by f.
template <class F>
FLASHPORT_DEVICE Vec fold_each(Vec (&x)[kVecWidth], const F& f) {
  constexpr auto lanes = std::make_integer_sequence<int, kVecWidth>();
  if constexpr (kVecWidth == 16) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) x[i] = fold_lanes<8>(x[i], x[i + 8], f, lanes);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 4; ++i) x[i] = fold_lanes<4>(x[i], x[i + 4], f, lanes);
#pragma GCC unroll 8
  for (int i = 0; i < 2; ++i) x[i] = fold_lanes<2>(x[i], x[i + 2], f, lanes);
  return fold_lanes<1>(x[0], x[1], f, lanes);
}

// Elements 4 i to 4 i + 3 of the result are the elements of x[i], combined by f. Vectors have 16.
template <class F>
FLASHPORT_DEVICE Vec fold_four(const Vec (&x)[4], const F& f) {
  constexpr auto lanes = std::make_integer_sequence<int, kVecWidth>();
  Vec y = fold_lanes<4>(fold_lanes<8>(x[0], x[2], f, lanes), fold_lanes<8>(x[1], x[3], f, lanes), f, lanes);
  y = f(y, swap_lanes<2>(y, lanes));
  return f(y, swap_lanes<1>(y, lanes));
}

// Element i of the result is the sum of the elements of x[i].
FLASHPORT_DEVICE Vec sum_each(Vec (&x)[kVecWidth]) {
  return fold_each(x, [](Vec a, Vec b) { return a + b; });
}

}  // namespace flashport::FLASHPORT_TARGET
