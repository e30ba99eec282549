// The count that num_splits 0 stands for: num_splits_heuristic, as it is called where it was published.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include <flashport/decode.h>

namespace flashport {

struct SplitShape {
  std::int64_t heads;    // of all sequences; those of keys, where the queries of a group are rows of one tile
  std::int64_t queries;  // of a head
  std::int64_t keys;
  int head_dim;
};

// Twice the multiprocessors, query blocks of 64.
[[nodiscard]] inline int published_splits(const SplitShape& shape, int multiprocessors) {
  const auto to_int = [](std::int64_t value) {
    return static_cast<int>(std::min<std::int64_t>(value, std::numeric_limits<int>::max()));
  };
  const int key_block = shape.head_dim <= 64 ? 256 : shape.head_dim <= 128 ? 128 : 64;
  return num_splits_heuristic(to_int(shape.heads * ((shape.queries + 63) / 64)), 2 * multiprocessors,
                              to_int((shape.keys + key_block - 1) / key_block), 128);
}

}  // namespace flashport
