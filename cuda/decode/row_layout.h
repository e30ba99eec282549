// How rows of K and V lie in a tile of shared memory: as stored (also quantised), so that eight rows meet in no bank.
// Plain C++, so that any host can check it.
#pragma once

#include "common/device/decode/chunks.h"
#include "common/device/decode/config.h"
#include "cuda/decode/lane_maps.h"

namespace flashport {

// Rows of one head lie as in device memory where they are whole 64-byte units, 16-byte units exchanged by the row's
// number (a shift of a row by padding would tear the copies' 128-byte requests apart); those of blocks are
// padded.
//
// With teams (kHeads of them) each team's ring has an equal part of a tile's rows, of all their heads: neighbours, as
// side by side as in device memory, or each in a column of its own. Heads of whole 128 bytes lie alike in both, with
// units exchanged as in a row of one head. One head of blocks begins or ends inside a unit, two together are
// whole units and four whole sectors of 32 bytes. Rows are an odd number of sectors: of eight rows four have the two
// units of each sector exchanged.
template <KvFormat kFormat, int kDim, int kHeads, int kTileRows = kLeafKeys>
struct RowLayout {
  static constexpr int kHeadBytes = kv_row_bytes(kFormat, kDim);
  static constexpr int kBytes = kHeads * kHeadBytes;
  static constexpr int kRows = kTileRows / kHeads;             // in a ring
  static constexpr int kColumn = (kHeadBytes + 15) / 16 * 16;  // with room for a head that begins inside a unit
  // Bytes inside which units are exchanged; none are inside 16.
  static constexpr int kExchanged = kHeadBytes % 64 == 0 ? 128 : kHeads > 1 ? 32 : 16;
  static constexpr int kPitch = kExchanged == 128  ? kBytes
                                : kExchanged == 32 ? (kHeads * kColumn / 32 | 1) * 32
                                                   : (kColumn / 16 | 1) * 16;
  // In a ring. Nothing is read behind the columns of the last row.
  static constexpr int kTileBytes =
      kExchanged == 32 ? kRows * kPitch - (kPitch - kHeads * kColumn) / 32 * 32 : (kRows * kPitch + 127) / 128 * 128;
  static_assert(kHeads == 1 || kHeadBytes % 32 == 0 ||
                    (is_block_cache(kFormat) && kBytes % 16 == 0 && kHeads * kColumn <= kPitch && 256 % kDim == 0),
                "teams are for heads of whole sectors, or of blocks that are whole units only together");
  // How many of a head's scales, one after the other, have places of their own: those of every so many blocks stay a
  // constant apart. Scales lie two bytes further into their units from block to block, and in no other half of a sector
  // than so many blocks before.
  static constexpr int kScalePlaces = kExchanged == 32 && has_nibbles(kFormat) ? 2 : 1;
  static_assert(kExchanged != 32 || has_long_header(kFormat) || kHeadBytes % 16 + 2 * (kDim / 32 - 1) < 16);

  // What the place of a byte is xored with in row `row`.
  static constexpr int swizzle(int row) {
    if (kExchanged == 16) return 0;
    if (kExchanged == 32) return (row >> 2 & 1) << 4;
    return kPitch % 128 == 0 ? (row & 7) << 4 : (row >> 1 & 3) << 4;
  }
  // From the beginning of the first ring's tile; rings are `ring_bytes` apart.
  static constexpr int row_offset(int row, int ring_bytes) {
    return kHeads == 1 ? row * kPitch : row / kRows * ring_bytes + row % kRows * kPitch;
  }
  // Whether a head's first block is its place among eight (lane_maps.h) as heads follow each other in memory. Kernels
  // with teams need it. Those without follow where another kernel of the shape has teams: the order of the products
  // comes from it, and bits must depend neither on the kernel nor on which team computes.
  static constexpr bool kCountsBlocksOn = kExchanged == 32 || (is_block_cache(kFormat) && kDim == 128);
  static constexpr int first_block(int head) { return kCountsBlocksOn ? kDim / 32 * head % 8 : 0; }
  // Where the row has its byte `byte`, before the exchange.
  static constexpr int column(int byte) { return byte; }
  // Where in a row the head begins that team `team` works on. `together`: the heads of the teams are side by side.
  static constexpr int head_offset(int team, int head, bool together) {
    return together ? team * kHeadBytes
                    : team * kColumn + kv_format_trait(kFormat).block_bytes * first_block(head) % 16;
  }
};

// Whether a kernel's products are those of wgmma, which takes 64 rows at a time and reads 16-bit values.
constexpr bool uses_wgmma(const DecodeShape& shape) { return shape.rows >= 64 && !is_narrow_cache(shape.k_format); }

// Rows of 16-bit values as wgmma reads them (cuda/arch/wgmma.h): panels of 128 bytes of each row, one panel after the
// other, and units exchanged inside these. The members are RowLayout's.
template <int kDim, int kTileRows = kLeafKeys>
struct PanelLayout {
  static constexpr int kHeadBytes = 2 * kDim;
  static constexpr int kBytes = kHeadBytes;
  static constexpr int kRows = kTileRows;
  static constexpr int kExchanged = 128;
  static constexpr int kPitch = kBytes;  // of all panels together
  static constexpr int kPanelBytes = kRows * 128;
  static constexpr int kTileBytes = kRows * kPitch;
  static constexpr int kScalePlaces = 1;
  static_assert(kBytes % 128 == 0 && kPanelBytes % 1024 == 0, "wgmma reads whole panels, eight rows at a time");

  static constexpr int swizzle(int row) { return (row & 7) << 4; }
  static constexpr int row_offset(int row, int /*ring_bytes*/ = 0) { return row * 128; }
  static constexpr int column(int byte) { return byte / 128 * kPanelBytes + byte % 128; }
  static constexpr int offset(int row, int byte) { return row_offset(row) + (column(byte) ^ swizzle(row)); }
  static constexpr int first_block(int) { return 0; }
  static constexpr int head_offset(int, int, bool) { return 0; }
};

// Where a head lies in the rows of a tile: its first byte, and its first block among the eight of lane_maps.h.
struct HeadPlace {
  int byte, block;
};
template <class Layout>
constexpr HeadPlace head_place(int team, int head, bool together) {
  return {Layout::head_offset(team, head, together), Layout::first_block(head)};
}
// Where in its row the unit lies in which block `block` of a head of blocks begins.
constexpr int first_unit_byte(KvFormat format, const HeadPlace& head, int block) {
  return head.byte - kv_format_trait(format).block_bytes * head.block + 16 * block_unit(format, head.block + block);
}

}  // namespace flashport
