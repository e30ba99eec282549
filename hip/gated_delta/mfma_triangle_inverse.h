// The inverse of a unit lower triangular matrix [64, 64] of floats in LDS, in place, by four waves. The diagonal's
// sub-blocks of 16 x 16 are inverted by forward substitution, a column a lane; inverses of 16 and of 32 rows are joined
// pairwise, [X11 0; X21 X22] with X21 = -X22 (A21 X11), by matrix instructions of fp32. These take the index of the sum
// in the order in which a lane holds the rows of a product, so that A21 X11 is the right operand of the next product in
// the same registers.
#pragma once

#include "common/device/gated_delta/triangular.h"
#include "hip/arch/mfma.h"

namespace flashport::FLASHPORT_TARGET::gated_delta {

// The matrix's sub-blocks of 16 x 16 up to the diagonal's: first those of the diagonal, as far apart as in a square of
// this pitch, then the others.
struct TriangleSubBlocks {
  static constexpr int kPitch = 16 + 4;  // rows begin in other banks
  static constexpr int kStep = 16 * (kPitch + 1);
  alignas(16) float values[10 * kStep];

  FLASHPORT_DEVICE static int offset(int row, int column) {
    return (row == column ? row : 4 + row * (row - 1) / 2 + column) * kStep;
  }
  FLASHPORT_DEVICE float* at(int row, int column) { return values + offset(row, column); }
  FLASHPORT_DEVICE const float* at(int row, int column) const { return values + offset(row, column); }
};

// sum += left [16, 16] right [16, 16]: lane 16 g + n has columns 4 g .. 4 g + 3 of row n of the left operand, and rows
// 4 g .. 4 g + 3 of column n of the right one.
FLASHPORT_DEVICE void mfma_float(Floats4& sum, const Floats4& left, const Floats4& right) {
#pragma unroll
  for (int i = 0; i < 4; ++i) sum = __builtin_amdgcn_mfma_f32_16x16x4f32(left[i], right[i], sum, 0, 0, 0);
}

// x = (I + A)^-1, where A is the strictly lower part of x. The caller has a barrier before it and one after it.
FLASHPORT_DEVICE void invert_unit_lower(const Block& block, TriangleSubBlocks& x) {
  constexpr int kPitch = TriangleSubBlocks::kPitch;
  const int n = block.lane() % 16, g = block.lane() / 16;
  const auto left = [&](int row, int column) {
    return *reinterpret_cast<const Floats4*>(x.at(row, column) + n * kPitch + 4 * g);
  };
  const auto right = [&](int row, int column) {
    const float* from = x.at(row, column) + 4 * g * kPitch + n;
    return Floats4{from[0], from[kPitch], from[2 * kPitch], from[3 * kPitch]};
  };
  // Sub-block (row, column) of -X22 (A21 X11), where X22 begins at sub-block `middle`.
  const auto join = [&](int middle, int row, int column) {
    Floats4 joined = {};
    for (int k = middle; k <= row; ++k) {
      Floats4 product = {};
      for (int i = column; i < middle; ++i) mfma_float(product, left(k, i), right(i, column));
      mfma_float(joined, left(row, k), 0.0f - product);
    }
    return joined;
  };
  const auto store = [&](int row, int column, const Floats4& joined) {
    float* to = x.at(row, column) + 4 * g * kPitch + n;
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i * kPitch] = joined[i];
  };

  static_assert(kWaveSize == kChunkTokens);  // one wave reads a row of all sub-blocks before it stores that row
  invert_diagonal_sub_blocks<kPitch>(block, x.values, x.values);
  block.sync();
  const int wave = block.wave();
  if (wave < 2) store(2 * wave + 1, 2 * wave, join(2 * wave + 1, 2 * wave + 1, 2 * wave));
  block.sync();
  const int row = 2 + wave / 2, column = wave % 2;
  const Floats4 joined = join(2, row, column);
  block.sync();  // all waves have read A21
  store(row, column, joined);
}

}  // namespace flashport::FLASHPORT_TARGET::gated_delta
