// The inverse of a unit lower triangular matrix [64, 64] in shared memory, in fp32: everything that follows would
// amplify a rounding within it.
//
// The diagonal's sub-blocks of 16 x 16 are inverted by forward substitution; then inverses of 16 and of 32 rows are
// joined pairwise, [X11 0; X21 X22] with X21 = -X22 (A21 X11). A lane takes Lanes::kColumns neighbouring columns of a
// row. The order of every sum is fixed.
#pragma once

#include "common/device/gated_delta/chunk_params.h"
#include FLASHPORT_TARGET_HEADER

namespace flashport::FLASHPORT_TARGET::gated_delta {

inline constexpr int kSubBlock = 16;  // rows and columns

// The diagonal's sub-blocks of x alone, for targets that join them by products of their own. Each of the first
// kChunkTokens threads has a column of a sub-block in registers. `x` may be `a`: a thread stores its element of a row
// after its wave has loaded the row.
template <int kPitch>
FLASHPORT_DEVICE void invert_diagonal_sub_blocks(const Block& block, const float* a, float* x) {
  if (block.thread() >= kChunkTokens) return;
  const int column = block.thread() % kSubBlock, first = block.thread() - column;
  const float* from = a + first * (kPitch + 1);
  float* to = x + first * (kPitch + 1) + column;
  float own[kSubBlock];  // this thread's column
  FLASHPORT_UNROLL(16)
  for (int row = 0; row < kSubBlock; ++row) {
    float sums[2] = {row == column ? 1.0f : 0.0f, 0.0f};
    FLASHPORT_UNROLL(16)
    for (int k = 0; k < row; ++k) sums[k % 2] = fma_rn(0.0f - from[row * kPitch + k], own[k], sums[k % 2]);
    own[row] = sums[0] + sums[1];
    to[row * kPitch] = own[row];
  }
}

// x = (I + a)^-1 for the strictly lower part of `a`. Rows of both are Lanes::kPitch floats apart. Sub-blocks of x above
// the diagonal hold intermediate sums afterwards. The caller has a barrier before it and one after it.
template <class Lanes>
FLASHPORT_DEVICE void invert_unit_lower(const Block& block, const float* a, float* x) {
  using Columns = typename Lanes::Columns;
  constexpr int kPitch = Lanes::kPitch;
  for (int item = block.thread(); item < kChunkTokens / Lanes::kColumns; item += block.threads()) {
    const int column = item * Lanes::kColumns, first = column / kSubBlock * kSubBlock;
    for (int row = first; row < first + kSubBlock; ++row) {
      Columns sum = Lanes::basis(row - column);
      FLASHPORT_UNROLL(8)
      for (int k = first; k < row; ++k) {
        sum = Lanes::multiply_add(0.0f - a[row * kPitch + k], Lanes::load(x + k * kPitch + column), sum);
      }
      Lanes::store(x + row * kPitch + column, sum);
    }
  }
  for (int half = kSubBlock; half < kChunkTokens; half *= 2) {
    const int vectors = half / Lanes::kColumns;  // of a row of X21
    const int items = kChunkTokens / 2 * vectors;
    // A21 X11 is stored above the diagonal, where the inverse has nothing.
    block.sync();
    for (int item = block.thread(); item < items; item += block.threads()) {
      const int column = item % vectors * Lanes::kColumns, row = item / vectors % half;
      const int top = item / vectors / half * 2 * half;
      const float* from = a + (top + half + row) * kPitch + top;
      Columns sum = {};
      FLASHPORT_UNROLL(8)
      for (int k = column / kSubBlock * kSubBlock; k < half; ++k) {
        sum = Lanes::multiply_add(from[k], Lanes::load(x + (top + k) * kPitch + top + column), sum);
      }
      Lanes::store(x + (top + row) * kPitch + top + half + column, sum);
    }
    block.sync();
    for (int item = block.thread(); item < items; item += block.threads()) {
      const int column = item % vectors * Lanes::kColumns, row = item / vectors % half;
      const int top = item / vectors / half * 2 * half;
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
