// The inverse of a unit lower triangular matrix [64, 64] in shared memory, in fp32: rounding within it would be
// amplified by everything that follows.
//
// Diagonal blocks of 16 x 16 by forward substitution; then blocks of 16 and of 32 are joined pairwise,
//   [X11 0; X21 X22] with X21 = -X22 (A21 X11).
// A lane takes Lanes::kColumns neighbouring columns of a row. The order of every sum is fixed.
#pragma once

#include "common/device/gated_delta/chunk_params.h"
#include FLASHPORT_TARGET_HEADER

namespace flashport::FLASHPORT_TARGET::gated_delta {

inline constexpr int kTriangleBlock = 16;

// The diagonal's blocks of x alone, a column of each in the registers of one of the first kChunkTokens threads: for
// targets that join them by products of their own. `x` may be `a`: a thread stores a row when its wave has loaded it.
template <int kPitch>
FLASHPORT_DEVICE void invert_diagonal_blocks(const Block& block, const float* a, float* x) {
  if (block.thread() >= kChunkTokens) return;
  const int column = block.thread() % kTriangleBlock, first = block.thread() - column;
  const float* from = a + first * (kPitch + 1);
  float* to = x + first * (kPitch + 1) + column;
  float of_column[kTriangleBlock];
  FLASHPORT_UNROLL(16)
  for (int row = 0; row < kTriangleBlock; ++row) {
    float sums[2] = {row == column ? 1.0f : 0.0f, 0.0f};
    FLASHPORT_UNROLL(16)
    for (int k = 0; k < row; ++k) sums[k % 2] = fma_rn(0.0f - from[row * kPitch + k], of_column[k], sums[k % 2]);
    of_column[row] = sums[0] + sums[1];
    to[row * kPitch] = of_column[row];
  }
}

// x = (I + a)^-1 for the strictly lower part of `a`. Rows of both are Lanes::kPitch floats apart. Blocks of x above
// the diagonal hold intermediate sums afterwards. The caller's next barrier ends it, as one has to precede it.
template <class Lanes>
FLASHPORT_DEVICE void invert_unit_lower(const Block& block, const float* a, float* x) {
  using Columns = typename Lanes::Columns;
  constexpr int kPitch = Lanes::kPitch;
  for (int item = block.thread(); item < kChunkTokens / Lanes::kColumns; item += block.threads()) {
    const int column = item * Lanes::kColumns, first = column / kTriangleBlock * kTriangleBlock;
    for (int row = first; row < first + kTriangleBlock; ++row) {
      Columns sum = Lanes::unit(row - column);
      FLASHPORT_UNROLL(8)
      for (int k = first; k < row; ++k) {
        sum = Lanes::multiply_add(0.0f - a[row * kPitch + k], Lanes::load(x + k * kPitch + column), sum);
      }
      Lanes::store(x + row * kPitch + column, sum);
    }
  }
  for (int half = kTriangleBlock; half < kChunkTokens; half *= 2) {
    const int groups = half / Lanes::kColumns;  // of a row of a block
    const int items = kChunkTokens / 2 * groups;
    // A21 X11, to where the inverse has nothing: the block above the diagonal.
    block.sync();
    for (int item = block.thread(); item < items; item += block.threads()) {
      const int column = item % groups * Lanes::kColumns, row = item / groups % half;
      const int top = item / groups / half * 2 * half;
      const float* from = a + (top + half + row) * kPitch + top;
      Columns sum = {};
      FLASHPORT_UNROLL(8)
      for (int k = column / kTriangleBlock * kTriangleBlock; k < half; ++k) {
        sum = Lanes::multiply_add(from[k], Lanes::load(x + (top + k) * kPitch + top + column), sum);
      }
      Lanes::store(x + (top + row) * kPitch + top + half + column, sum);
    }
    block.sync();
    for (int item = block.thread(); item < items; item += block.threads()) {
      const int column = item % groups * Lanes::kColumns, row = item / groups % half;
      const int top = item / groups / half * 2 * half;
      const float* from = x + (top + half + row) * kPitch + top + half;
      Columns sum = {};
      FLASHPORT_UNROLL(8)
      for (int k = 0; k <= row; ++k) {
        sum = Lanes::multiply_add(0.0f - from[k], Lanes::load(x + (top + k) * kPitch + top + half + column), sum);
      }
      Lanes::store(x + (top + half + row) * kPitch + top + column, sum);
    }
  }
}

}  // namespace flashport::FLASHPORT_TARGET::gated_delta
