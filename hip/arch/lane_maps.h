// Which element of a 16x16x16 matrix instruction a lane holds, as the ISA manuals have it. Plain C++, so that any host
// can check them.
//   MFMA (CDNA, wave64), lane = 16 g + n: operands hold row (A) or column (B) n, k = 4 g + element; D holds column n,
//   row 4 g + register. WMMA (RDNA3, wave32), lane = 16 h + n: operands hold row or column n and every k, in both
//   halves; D holds column n, row 2 register + h.
#pragma once

namespace flashport {

constexpr int mfma_line(int lane) { return lane % 16; }
constexpr int mfma_k(int lane, int element) { return lane / 16 * 4 + element; }
constexpr int mfma_row(int lane, int reg) { return lane / 16 * 4 + reg; }
// The key of row `row` of product `tile`, where two successive products take 32 keys: a lane's four rows of the one and
// its four rows of the other are eight neighbouring keys.
constexpr int mfma_pair_key(int tile, int row) { return tile / 2 * 32 + row / 4 * 8 + tile % 2 * 4 + row % 4; }

constexpr int wmma_line(int lane) { return lane % 16; }
constexpr int wmma_row(int reg, int half) { return 2 * reg + half; }
// The row of a left operand that line n must hold, so that the registers of a half are neighbouring rows of the result:
// register r of half h is row 8 h + r.
constexpr int wmma_line_in_order(int n) { return n % 2 * 8 + n / 2; }

// A column of a product of 32x32 (MFMA, lane = 32 h + n has column n), or of products of 16x16 of WMMA whose left
// operand has its rows in the order of wmma_line_in_fours, is in two lanes: element i of lane h is this row.
constexpr int column_row(int element, int half) { return element / 4 * 8 + half * 4 + element % 4; }
constexpr int wmma_line_in_fours(int n) { return n / 8 * 8 + n % 2 * 4 + n / 2 % 4; }

// The order in which the keys of a leaf are multiplied on RDNA3: positions 2 i and 2 i + 1 hold keys 16 apart.
constexpr int key_at(int position) {
  return position / 32 * 32 + position % 32 / 16 * 8 + position % 16 / 2 + position % 2 * 16;
}

}  // namespace flashport
