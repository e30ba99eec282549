// How rows of K and V lie in a tile of shared memory: as stored (also quantised), so that eight rows meet in no bank.
// Plain C++, so that any host can check it.
#pragma once

#include "common/device/config.h"
#include "common/device/tree_layout.h"

namespace flashport {

// Rows of one head lie as in device memory where they are whole 64-byte units, 16-byte units exchanged by the row's
// number (a shift of a row by padding would tear the copies' 128-byte requests apart); those of q8_0 are padded.
//
// With teams the rows of their kHeads neighbouring heads lie side by side, and each team's ring holds an equal part of
// a tile's rows. One head of q8_0 begins and ends inside a sector of 32 bytes, all together are whole sectors, an odd
// number of them: of eight rows four have the two units of each sector exchanged.
template <KvFormat kFormat, int kDim, int kHeads>
struct RowLayout {
  static constexpr int kHeadBytes = kv_row_bytes(kFormat, kDim);
  static constexpr int kBytes = kHeads * kHeadBytes;
  static constexpr int kRows = kLeafKeys / kHeads;  // in a ring
  // Bytes inside which units are exchanged; none are inside 16.
  static constexpr int kExchanged = kHeads > 1 ? 32 : kBytes % 64 == 0 ? 128 : 16;
  static constexpr int kPitch = kExchanged == 16 ? ((kBytes + 15) / 16 | 1) * 16 : kBytes;
  static_assert(kHeads == 1 || (kFormat == KvFormat::kQ8_0 && kBytes % 64 == 32 && 8 % (kDim / 32) == 0),
                "teams are for heads of q8_0 that are whole sectors only together");

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
};

// The number of a team's first block among the q8_0 blocks that lie side by side in a row.
constexpr int first_block(const DecodeConfig& cfg, int team) {
  return cfg.tuning.teams == 1 ? 0 : team * (cfg.shape.head_dim_qk / 32);
}

}  // namespace flashport
