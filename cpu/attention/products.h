// Products of attention in fp32, from register tiles of kProductRows x kProductVecs vectors of sums. Each sum runs over
// the depth in index order, whatever register tile it is in.
//
// The right side is packed in panels of kPanel columns: panel [depth, kPanel], one after the other.
#pragma once

#include FLASHPORT_TARGET_HEADER

namespace flashport::FLASHPORT_TARGET::attention {

inline constexpr int kPanel = 64;

// sums [kRows, kVecs * 16] = left [kRows, depth] right [depth, kVecs * 16], or are added to what they were
template <int kRows, int kVecs, bool kAdds>
FLASHPORT_DEVICE void multiply_block(float* sums, int sum_pitch, const float* left, int left_pitch, const float* right,
                                     int depth) {
  Vec acc[kRows][kVecs] = {};
  if constexpr (kAdds) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int c = 0; c < kVecs; ++c) acc[r][c] = load_vec(sums + r * sum_pitch + c * kVecWidth);
    }
  }
  for (int k = 0; k < depth; ++k) {
    Vec x[kVecs];
#pragma GCC unroll 8
    for (int c = 0; c < kVecs; ++c) x[c] = keep_loaded(load_vec(right + k * kPanel + c * kVecWidth));
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Vec factor = keep_loaded(broadcast(left[r * left_pitch + k]));
#pragma GCC unroll 8
      for (int c = 0; c < kVecs; ++c) acc[r][c] = fma_rn(factor, x[c], acc[r][c]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int c = 0; c < kVecs; ++c) store_vec(sums + r * sum_pitch + c * kVecWidth, acc[r][c]);
  }
}

// sums [rows, vecs * 16] = left [rows, depth] right, in panels, or are added to what they were
template <bool kAdds>
[[gnu::noinline]] inline void multiply(float* sums, int sum_pitch, const float* left, int left_pitch, int rows,
                                       const float* right, int vecs, int depth) {
  constexpr int kPanelVecs = kPanel / kVecWidth;
  for (int first = 0; first < vecs; first += kPanelVecs) {
    const float* panel = right + first * kVecWidth * depth;
    const int panel_vecs = minimum(vecs - first, kPanelVecs);
    const auto strip = [&]<int kRows>(int row) {
      float* at = sums + row * sum_pitch + first * kVecWidth;
      const float* from = left + row * left_pitch;
      int vec = 0;
      for (; vec + kProductVecs <= panel_vecs; vec += kProductVecs) {
        multiply_block<kRows, kProductVecs, kAdds>(at + vec * kVecWidth, sum_pitch, from, left_pitch,
                                                   panel + vec * kVecWidth, depth);
      }
      for (; vec < panel_vecs; ++vec) {
        multiply_block<kRows, 1, kAdds>(at + vec * kVecWidth, sum_pitch, from, left_pitch, panel + vec * kVecWidth,
                                        depth);
      }
    };
    int row = 0;
    for (; row + kProductRows <= rows; row += kProductRows) strip.template operator()<kProductRows>(row);
    for (; row < rows; ++row) strip.template operator()<1>(row);
  }
}

}  // namespace flashport::FLASHPORT_TARGET::attention
