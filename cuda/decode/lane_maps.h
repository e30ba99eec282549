// In which order byte caches (fp8, q8_0) lie in the operands of mma.sync. Plain C++, so that any host can check it.
//
// ldmatrix moves units of 16 bytes: lane 4 g + c gets bytes 4 c .. 4 c + 3 of row g, or, transposed, bytes 2 g and
// 2 g + 1 of rows 2 c and 2 c + 1. Two units are the 32 places of a group: place 4 c + {0, 1, 2, 3} of a unit of keys
// sits where k = 2 c, 2 c + 1, 2 c + 8, 2 c + 9 is due, place 2 g + {0, 1} of a unit of values in rows g and g + 8.
// fp8: place p is dim p.
//
// A q8_0 block of 34 bytes (an fp16 scale, 32 int8) begins anywhere in a unit and reaches into three. Eight blocks are
// 17 units: block b of them begins in unit 2 b, its values at byte 2 b + 2. The bytes from there on and those of unit
// 2 b + 2 before there make one whole unit, unit 2 b + 1 is the other: the block turned by 2 b + 2 places. Heads that
// lie side by side (row_layout.h) count their blocks on, so the first of a head is `first_block`.
#pragma once

#include "common/device/kv/format.h"

namespace flashport {

constexpr bool is_byte_format(KvFormat format) { return format == KvFormat::kFp8E4M3 || format == KvFormat::kQ8_0; }

// The unit in which a q8_0 block begins, the byte after its scale in it, and the dim at a place.
constexpr int q8_0_unit(int block) { return block / 8 * 17 + block % 8 * 2; }
constexpr int q8_0_turn(int block) { return block % 8 * 2 + 2; }
constexpr int q8_0_dim(int block, int place) { return (place - q8_0_turn(block)) & 31; }
// Which of the units from there on ldmatrix.x4 has from a lane, of the two that follow: lanes 0 .. 15 bring the last
// one, so that two units before it is the first and also two units exchanged for each other stay a constant apart.
constexpr int q8_0_lane_unit(int lane) { return 2 - lane / 16; }
// How a key operand's lane 4 g + c makes a word of bytes 4 c .. 4 c + 3 of the block's first unit and its last: as
// __byte_perm selects from both. For values, which come in pairs, lanes 4 g + c with g > block % 8 take the first.
constexpr unsigned q8_0_selector(int block, int c) {
  const int of_last = q8_0_turn(block) - 4 * c;
  return of_last <= 0 ? 0x3210 : of_last >= 4 ? 0x7654 : 0x3254;
}

// The column of a value operand's row g + 8 half; `tile` counts 16 columns.
constexpr int value_column(KvFormat format, int first_block, int tile, int g, int half) {
  if (!is_byte_format(format)) return 16 * tile + g + 8 * half;
  const int place = tile % 2 * 16 + 2 * g + half;
  return tile / 2 * 32 + (format == KvFormat::kQ8_0 ? q8_0_dim(first_block + tile / 2, place) : place);
}

// Where a query row in shared memory has `dim`, so that ldmatrix, which gives lane 4 g + c columns 2 c and 2 c + 1 of
// eight, gives the order of the keys.
constexpr int query_column(KvFormat format, int first_block, int dim) {
  if (!is_byte_format(format)) return dim;
  const int turn = format == KvFormat::kQ8_0 ? q8_0_turn(first_block + dim / 32) : 0;
  const int place = (dim + turn) & 31;
  return dim / 32 * 32 + (place & 16) + place % 4 / 2 * 8 + place % 16 / 4 * 2 + place % 2;
}

}  // namespace flashport
