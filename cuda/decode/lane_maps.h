// In which order narrow caches (fp8, and formats of blocks) lie in the operands of mma.sync. Plain C++, so that any
// host can check it.
//
// ldmatrix moves units of 16 bytes: lane 4 g + c gets bytes 4 c .. 4 c + 3 of row g, or, transposed, bytes 2 g and
// 2 g + 1 of rows 2 c and 2 c + 1. A group is 32 values of a row, each at a place: of keys, places 4 c + {0, 1, 2, 3}
// of 16 sit where k = 2 c, 2 c + 1, 2 c + 8, 2 c + 9 is due; of values, places 2 g + {0, 1} of 16 in rows g and g + 8.
// The places are the bytes of two units or, of nibbles, the low halves of one unit's bytes and then the high ones. fp8:
// place p is dim p.
//
// A block of ggml's formats is a header, of h bytes, and codes, which fill whole units of their own and lie anywhere in
// those of the row. The header is the scale (fp16), then a minimum (q4_1, q5_1) and the fifth bits of 32 codes (q5_0,
// q5_1). Eight blocks are whole units: the codes of block b of them begin at byte h (b + 1) of a unit, if that is taken
// modulo 16. The bytes from there on and those of the block's last unit before there make one whole unit: the block
// turned by so many places. The unit between is q8_0's other one. Heads that lie side by side count their blocks on,
// also where they are copied alone (row_layout.h), so the first of a head is `first_block`.
#pragma once

#include "common/device/decode/config.h"
#include "common/device/kv/format.h"

namespace flashport {

constexpr bool has_fifth_bits(KvFormat format) { return format == KvFormat::kQ5_0 || format == KvFormat::kQ5_1; }
constexpr bool has_minimum(KvFormat format) { return format == KvFormat::kQ4_1 || format == KvFormat::kQ5_1; }
constexpr bool has_long_header(KvFormat format) { return has_minimum(format) || has_fifth_bits(format); }
// Codes of four bits that stand for themselves.
constexpr bool has_plain_nibbles(KvFormat format) { return format == KvFormat::kQ4_0 || format == KvFormat::kQ4_1; }
// Codes are nibbles, in one format with a table of what they stand for, in some with fifth bits that lie apart.
constexpr bool has_nibbles(KvFormat format) {
  return format == KvFormat::kQ4_0 || format == KvFormat::kIq4Nl || has_long_header(format);
}
constexpr bool is_block_cache(KvFormat format) {
  return format == KvFormat::kQ8_0 || has_nibbles(format) || format == KvFormat::kBlocks;
}
constexpr bool is_narrow_cache(KvFormat format) {
  return is_format_of_bytes(format) || format == KvFormat::kBytes || format == KvFormat::kInt4 ||
         is_block_cache(format);
}

// The units that the codes of a block fill.
constexpr int units_of_block(KvFormat format) { return kv_format_trait(format).block_bytes / 16; }
// The unit where the codes of a block begin, or the one before if they are whole units; and by how many places they are
// turned, 16 if so.
constexpr int block_unit(KvFormat format, int block) {
  const int bytes = kv_format_trait(format).block_bytes;
  return block / 8 * (bytes / 2) + (bytes * (block % 8 + 1) - 1) / 16 - units_of_block(format);
}
constexpr int block_turn(KvFormat format, int block) { return (header_bytes(format) * (block % 8 + 1) - 1) % 16 + 1; }
// Where a lane's row of ldmatrix.x4 begins that brings two units of a block which ends before byte `end` of a row, and
// has one unit of codes: lanes 0 .. 15 bring block_unit().
constexpr int block_units_byte(int end, int lane) { return ((end - 1) & ~15) - 16 + (lane & 16); }
// Which of the units from there on ldmatrix.x4 has from a lane. q8_0, of the two that follow: lanes 0 .. 15 bring the
// last one, so that two units before it is the first and also two units exchanged for each other stay a constant apart.
constexpr int lane_unit(KvFormat format, int lane) { return format == KvFormat::kQ8_0 ? 2 - lane / 16 : lane / 16; }
// How a key operand's lane 4 g + c makes a word of bytes 4 c .. 4 c + 3 of the block's first unit and its last: as
// __byte_perm selects from both. Those of q4_0, q4_1, q5_0 and q5_1 come as 0, 2, 1, 3: the halves of a word then have
// neighbours in their low bytes, and in their high ones. Those of q8_0 and iq4_nl come in order. For values, which come
// in pairs, lanes 4 g + c with 2 g no less than the block's turn take the first.
constexpr bool crosses_bytes(KvFormat format) { return has_nibbles(format) && format != KvFormat::kIq4Nl; }
constexpr unsigned block_selector(KvFormat format, int block, int c) {
  const int of_last = block_turn(format, block) - 4 * c;
  const unsigned bytes = of_last <= 0 ? 0x3210 : of_last >= 4 ? 0x7654 : 0x3254;
  return crosses_bytes(format) ? (bytes & 0xf00f) | (bytes & 0x00f0) << 4 | (bytes & 0x0f00) >> 4 : bytes;
}

// The order of the dims of 32 values, also of a format that only the call knows: by how many places each block is
// turned further than the one before, among as many as `turned` has bits for.
struct DimOrder {
  bool narrow;
  int turn, turned;
};
constexpr DimOrder dim_order(KvFormat format) {
  return {is_narrow_cache(format), is_block_cache(format) ? header_bytes(format) : 0, has_nibbles(format) ? 15 : 31};
}
constexpr int turned(const DimOrder& order, int place, int by) {
  return ((place + by) & order.turned) | (place & 31 & ~order.turned);
}

// The column of a value operand's row g + 8 half; `tile` counts 16 columns.
constexpr int value_column(const DimOrder& order, int first_block, int tile, int g, int half) {
  if (!order.narrow) return 16 * tile + g + 8 * half;
  const int turn = order.turn * ((first_block + tile / 2) % 8 + 1);
  return tile / 2 * 32 + turned(order, tile % 2 * 16 + 2 * g + half, -turn);
}

// Where a query row in shared memory has `dim`, so that ldmatrix, which gives lane 4 g + c columns 2 c and 2 c + 1 of
// eight, gives the order of the keys.
constexpr int query_column(const DimOrder& order, int first_block, int dim) {
  if (!order.narrow) return dim;
  const int place = turned(order, dim, order.turn * ((first_block + dim / 32) % 8 + 1));
  return dim / 32 * 32 + (place & 16) + place % 4 / 2 * 8 + place % 16 / 4 * 2 + place % 2;
}

// The same of int4, whose bytes have two neighbours each. Keys: lane 4 g + c has eight dims of 32, and dims four apart
// in a word. Values: it has four columns of 32.
constexpr int int4_value_column(int tile, int g, int half) { return tile / 2 * 32 + 4 * g + tile % 2 * 2 + half; }
constexpr int int4_query_column(int dim) {
  return dim / 32 * 32 + dim % 4 / 2 * 16 + dim % 2 * 8 + dim % 32 / 8 * 2 + dim % 8 / 4;
}

}  // namespace flashport
