// How the keys of a sequence are cut into pieces, where few queries would leave most of a device idle: plain arithmetic
// that host and device must agree on.
//
// A piece is some neighbouring key tiles. The work tiles of a piece leave partial results in fp32, which a second
// launch merges (merge_pieces_kernel.h). How many pieces there are follows from the sequence's own lengths and window,
// the number of heads and the kernel's tuning: so the sums of a row have one order, whatever else is in the batch.
#pragma once

#include "common/device/attention/params.h"

namespace flashport {

inline constexpr int kMostPieces = 128;  // of a sequence
// By lengths, a piece has no fewer keys, and no fewer for each query: or it would take longer to merge partial results
// than their work tiles save. So a prompt whose queries are its keys is never cut.
inline constexpr unsigned kLeastPieceKeys = 1024, kLeastPieceKeysOfQuery = 4;

// A sequence's pieces, and the key tiles that each but the last has, the first from the tile with the first key that
// any query sees.
struct Pieces {
  int count, tiles;
};

// The pieces of a sequence with q_len queries, 1 or more, which see keys from first_key on. Always inline: a call would
// take scratch memory on HIP.
[[nodiscard, gnu::always_inline]] constexpr Pieces cut_keys(const PieceRule& rule, int q_len, int first_key,
                                                            int kv_len) {
  // Divisions without a sign are shorter.
  const auto queries = static_cast<unsigned>(q_len), keys = static_cast<unsigned>(kv_len - first_key);
  const auto tile = static_cast<unsigned>(rule.keys), rows = static_cast<unsigned>(rule.rows);
  auto wanted = static_cast<unsigned>(rule.count);
  if (wanted == 0) {
    wanted = static_cast<unsigned>(rule.work_tiles) / ((queries + rows - 1) / rows);
    const unsigned least = kLeastPieceKeysOfQuery * queries;  // does not overflow where some are wanted
    if (wanted > 1) {
      const unsigned by_keys = keys / (least > kLeastPieceKeys ? least : kLeastPieceKeys);
      wanted = by_keys < wanted ? by_keys : wanted;
      wanted = unsigned{kMostPieces} < wanted ? unsigned{kMostPieces} : wanted;
    }
  }
  if (wanted <= 1) return {1, 0x7fffffff};
  const unsigned tiles = (static_cast<unsigned>(kv_len) + tile - 1) / tile - static_cast<unsigned>(first_key) / tile;
  const unsigned each = (tiles + wanted - 1) / wanted;
  if (each == 0) return {1, 0x7fffffff};
  return {static_cast<int>((tiles + each - 1) / each), static_cast<int>(each)};
}

}  // namespace flashport
