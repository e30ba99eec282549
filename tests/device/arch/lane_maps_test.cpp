// The lane maps of AMD's matrix instructions against the tables of the ISA manuals (CDNA3: "Matrix core instructions",
// RDNA3: "WMMA"), which go the other way: from an element to its lane and register.
#include "hip/arch/lane_maps.h"

#include <gtest/gtest.h>

#include <cstdint>

namespace flashport {
namespace {

TEST(LaneMaps, MfmaOperandsAndResult) {
  for (int line = 0; line < 16; ++line) {
    for (int k = 0; k < 16; ++k) {
      // A[line][k] and B[k][line]: lane line + 16 (k / 4), element k mod 4 of the two registers.
      EXPECT_EQ(mfma_line(line + 16 * (k / 4)), line);
      EXPECT_EQ(mfma_k(line + 16 * (k / 4), k % 4), k);
      // D[k][line]: lane line + 16 (k / 4), register k mod 4.
      EXPECT_EQ(mfma_row(line + 16 * (k / 4), k % 4), k);
    }
  }
}

// What the kernels build on: S^T = K Q^T, rounded, is the operand P^T of O^T = V^T P^T, lane by lane.
TEST(LaneMaps, MfmaResultIsTheNextOperand) {
  for (int lane = 0; lane < 64; ++lane) {
    for (int i = 0; i < 4; ++i) EXPECT_EQ(mfma_row(lane, i), mfma_k(lane, i));
  }
}

// Two tiles have 32 keys between them, each once, and the two fours of a lane are eight neighbours.
TEST(LaneMaps, MfmaPairOrder) {
  for (int pair = 0; pair < 4; ++pair) {
    std::uint32_t seen = 0;
    for (int tile : {2 * pair, 2 * pair + 1}) {
      for (int row = 0; row < 16; ++row) seen |= std::uint32_t{1} << (mfma_pair_key(tile, row) - 32 * pair);
    }
    EXPECT_EQ(seen, ~std::uint32_t{0});
    for (int lane = 0; lane < 64; ++lane) {
      for (int i = 0; i < 8; ++i) {
        EXPECT_EQ(mfma_pair_key(2 * pair + i / 4, mfma_row(lane, i % 4)), 32 * pair + lane / 16 * 8 + i);
      }
    }
  }
}

// 32x32: register 4 i + j of lane 32 h + n holds D[8 i + 4 h + j][n].
TEST(LaneMaps, ColumnOfTwoLanes) {
  for (int row = 0; row < 32; ++row) EXPECT_EQ(column_row(row / 8 * 4 + row % 4, row / 4 % 2), row);
}

// WMMA with its rows in this order gives the same elements to lanes: register r of half h is line 2 r + h.
TEST(LaneMaps, WmmaLinesInFours) {
  for (int half = 0; half < 2; ++half) {
    for (int reg = 0; reg < 8; ++reg) {
      EXPECT_EQ(wmma_line_in_fours(wmma_row(reg, half)), column_row(reg, half));
      EXPECT_EQ(16 + wmma_line_in_fours(wmma_row(reg, half)), column_row(8 + reg, half));
    }
  }
}

TEST(LaneMaps, WmmaResult) {
  for (int row = 0; row < 16; ++row) {
    for (int column = 0; column < 16; ++column) {
      // D[row][column]: register row / 2, lane column + 16 (row mod 2).
      const int lane = column + 16 * (row % 2);
      EXPECT_EQ(wmma_line(lane), column);
      EXPECT_EQ(wmma_row(row / 2, lane / 16), row);
    }
  }
}

// Whose rows go in in this order, a lane's eight results are neighbours.
TEST(LaneMaps, WmmaLinesInOrder) {
  for (int half = 0; half < 2; ++half) {
    for (int reg = 0; reg < 8; ++reg) EXPECT_EQ(wmma_line_in_order(wmma_row(reg, half)), 8 * half + reg);
  }
}

// A lane's eight scores of a tile follow one another, a half of the wave at a time, and every key has a position of its
// own.
TEST(LaneMaps, KeyOrder) {
  std::uint64_t seen = 0;
  for (int position = 0; position < 64; ++position) {
    seen |= std::uint64_t{1} << key_at(position);
    EXPECT_EQ(key_at(position), key_at(position - position % 8) + key_at(position % 8));
    EXPECT_EQ(key_at(position ^ 1), key_at(position) ^ 16);
  }
  EXPECT_EQ(seen, ~std::uint64_t{0});
}

}  // namespace
}  // namespace flashport
