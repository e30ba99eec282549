// In which order narrow caches (fp8, q8_0, q4_0, iq4_nl) lie in the operands of mma.sync. Plain C++, so that any host
// can check it.
//
// ldmatrix moves units of 16 bytes: lane 4 g + c gets bytes 4 c .. 4 c + 3 of row g, or, transposed, bytes 2 g and
// 2 g + 1 of rows 2 c and 2 c + 1. A group is 32 values of a row, each at a place: of keys, places 4 c + {0, 1, 2, 3}
// of 16 sit where k = 2 c, 2 c + 1, 2 c + 8, 2 c + 9 is due; of values, places 2 g + {0, 1} of 16 in rows g and g + 8.
// The places are the bytes of two units or, of nibbles, the low halves of one unit's bytes and then the high ones. fp8:
// place p is dim p.
//
// A block of ggml's formats begins with its scale (fp16, two bytes) anywhere in a unit and reaches into one more than
// its values fill: q8_0 has 34 bytes, q4_0 and iq4_nl 18. Eight blocks are 17 units, or 9: block b of them begins in
// unit 2 b, or b, its values at byte 2 b + 2. The bytes from there on and those of its last unit before there make one
// whole unit: the block turned by 2 b + 2 places. The unit between is q8_0's other one. Heads that lie side by side
// count their blocks on, also where they are copied alone (row_layout.h), so the first of a head is `first_block`.
#pragma once

#include "common/device/kv/format.h"

namespace flashport {

// Codes of four bits.
constexpr bool has_nibbles(KvFormat format) { return format == KvFormat::kQ4_0 || format == KvFormat::kIq4Nl; }
constexpr bool is_block_cache(KvFormat format) {
  return format == KvFormat::kQ8_0 || has_nibbles(format) || format == KvFormat::kBlocks;
}
constexpr bool is_narrow_cache(KvFormat format) { return format == KvFormat::kFp8E4M3 || is_block_cache(format); }

// The units that the values of a block fill, the unit in which a block begins, the byte after its scale there, and the
// value of the block at a place.
constexpr int units_of_block(KvFormat format) {
  return (kv_format_trait(format).block_bytes - kv_format_trait(format).scale_bytes) / 16;
}
constexpr int block_unit(KvFormat format, int block) {
  return block / 8 * (kv_format_trait(format).block_bytes / 2) + block % 8 * units_of_block(format);
}
constexpr int block_turn(int block) { return block % 8 * 2 + 2; }
constexpr int turned_places(KvFormat format) { return has_nibbles(format) ? 15 : 31; }  // the bits that count them
constexpr int block_dim(KvFormat format, int block, int place) {
  const int turned = turned_places(format);
  return ((place - block_turn(block)) & turned) | (place & ~turned);
}
// Which of the units from there on ldmatrix.x4 has from a lane. q8_0, of the two that follow: lanes 0 .. 15 bring the
// last one, so that two units before it is the first and also two units exchanged for each other stay a constant apart.
constexpr int lane_unit(KvFormat format, int lane) { return format == KvFormat::kQ8_0 ? 2 - lane / 16 : lane / 16; }
// How a key operand's lane 4 g + c makes a word of bytes 4 c .. 4 c + 3 of the block's first unit and its last: as
// __byte_perm selects from both. Those of q4_0 come as 0, 2, 1, 3: the halves of a word then have neighbours in their
// low bytes, and in their high ones. For values, which come in pairs, lanes 4 g + c with g > block % 8 take the first.
constexpr unsigned block_selector(KvFormat format, int block, int c) {
  const int of_last = block_turn(block) - 4 * c;
  const unsigned bytes = of_last <= 0 ? 0x3210 : of_last >= 4 ? 0x7654 : 0x3254;
  return format == KvFormat::kQ4_0 ? (bytes & 0xf00f) | (bytes & 0x00f0) << 4 | (bytes & 0x0f00) >> 4 : bytes;
}

// The column of a value operand's row g + 8 half; `tile` counts 16 columns.
constexpr int value_column(KvFormat format, int first_block, int tile, int g, int half) {
  if (!is_narrow_cache(format)) return 16 * tile + g + 8 * half;
  const int place = tile % 2 * 16 + 2 * g + half;
  return tile / 2 * 32 + (is_block_cache(format) ? block_dim(format, first_block + tile / 2, place) : place);
}

// Where a query row in shared memory has `dim`, so that ldmatrix, which gives lane 4 g + c columns 2 c and 2 c + 1 of
// eight, gives the order of the keys.
constexpr int query_column(KvFormat format, int first_block, int dim) {
  if (!is_narrow_cache(format)) return dim;
  int place = dim & 31;
  if (is_block_cache(format)) {
    const int turned = turned_places(format);
    place = ((dim + block_turn(first_block + dim / 32)) & turned) | (place & ~turned);
  }
  return dim / 32 * 32 + (place & 16) + place % 4 / 2 * 8 + place % 16 / 4 * 2 + place % 2;
}

}  // namespace flashport
