// A launch of the decode schedule on the host: lengths, tiles and a grid, and what each block finds of them.
#pragma once

#define FLASHPORT_TARGET turns
#define FLASHPORT_TARGET_HEADER "tests/device/decode/turns_target.h"
#include "common/device/decode/schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <ostream>
#include <vector>

namespace flashport::turns::decode {

struct Launch {
  std::vector<std::int32_t> lengths;
  int kv_heads = 1, row_tiles = 1;
  std::int64_t grid = 1;
  std::int64_t window = -1;
  int turn_leaves = 1;
  std::int32_t csr_page = 0;  // lengths come from a CSR table with pages of so many tokens; 0: from seqlens
  // The lengths as blocks read them (params_of).
  mutable std::vector<std::int32_t> read = {}, read_indptr = {};
  int tiles() const { return kv_heads * row_tiles; }
};

inline std::ostream& operator<<(std::ostream& out, const Launch& launch) {
  out << launch.kv_heads << " heads x " << launch.row_tiles << " row tiles, grid " << launch.grid << ", window "
      << launch.window << ", turns of " << launch.turn_leaves << ", CSR pages of " << launch.csr_page << ", lengths";
  for (const std::int32_t length : launch.lengths) out << ' ' << length;
  return out;
}

// As common/host/decode/plan.cpp plans it.
inline DecodeParams params_of(const Launch& launch) {
  // Lanes that have not been told everything yet read past the end; what they find there must not matter.
  const std::size_t places = 2 * launch.lengths.size() + 4 * kMostLanes;
  launch.read = launch.lengths;
  launch.read_indptr = {0};
  for (std::int32_t& length : launch.read) {
    if (launch.csr_page == 0) break;
    const std::int32_t pages = (length + launch.csr_page - 1) / launch.csr_page;
    launch.read_indptr.push_back(launch.read_indptr.back() + pages);
    if (pages > 0) length -= (pages - 1) * launch.csr_page;  // of the last page
  }
  launch.read.resize(places, 12345);
  launch.read_indptr.resize(places + 1, 12345);
  DecodeParams p{};
  p.batch = static_cast<std::int32_t>(launch.lengths.size());
  p.num_kv_heads = launch.kv_heads;
  p.row_tiles = launch.row_tiles;
  p.by_row_tiles = make_divisor(launch.row_tiles);
  p.max_q_len = 1;
  if (launch.csr_page == 0) {
    p.cache.seqlens = {launch.read.data(), 0};
  } else {
    p.cache.kv_indptr = launch.read_indptr.data();
    p.cache.kv_last_page_len = launch.read.data();
    p.cache.page_size = launch.csr_page;
  }
  p.cache.max_len = *std::max_element(launch.lengths.begin(), launch.lengths.end());
  p.window_left = static_cast<std::int32_t>(launch.window);
  p.clear_right = 1;
  p.chunk_rule = {chunk_target_shift(launch.kv_heads), launch.turn_leaves - 1, false};
  p.side_partials = most_partials(most_chunks(std::max<std::int64_t>(leaves_of(p.cache.max_len), 1), p.chunk_rule));
  p.cuts[0] = line_cut(launch.tiles(), launch.grid, 1, kLeastConcurrentLeaves);
  p.cuts[1] =
      line_cut(launch.tiles(), launch.grid, concurrent_tiles(launch.tiles(), launch.grid), kLeastConcurrentLeaves);
  return p;
}

// Leaves of the tiles of a sequence.
inline int leaves_of_tile(const Launch& launch, std::int64_t length) {
  const std::int64_t unseen = launch.window < 0 ? 0 : std::max<std::int64_t>(length - 1 - launch.window, 0);
  return static_cast<int>(std::max<std::int64_t>(leaves_of(length - unseen / kLeafKeys * kLeafKeys), 1));
}

// What all lanes of the block's waves find.
inline Range range_of(const DecodeParams& p, std::int64_t block, std::int64_t grid) {
  Wave wave;
  std::vector<Range> ranges(kWaveSize);
  decltype(wave.told) before;
  do {
    before = wave.told;
    for (int lane = 0; lane < kWaveSize; ++lane) ranges[lane] = block_range(p, Block(block, grid, lane, wave));
  } while (kWaveSize > 1 && wave.told != before);
  for (const Range& range : ranges) {
    const Segment &s = range.segment, &first = ranges[0].segment;
    EXPECT_TRUE(range.end == ranges[0].end && s.seq == first.seq && s.start == first.start && s.first == first.first &&
                s.last == first.last && s.kv_head == first.kv_head && s.row_tile == first.row_tile);
  }
  return ranges[0];
}

// f(segment) of each work tile of a block's range, in order.
template <class F>
void for_each_segment(const DecodeParams& p, const Range& range, const F& f) {
  LeafCursor now(range);
  while (!now.done()) {
    f(now.segment);
    now.leaf = now.segment.last - 1;
    now.next(p);
  }
}

inline int tile_index(const DecodeParams& p, const Segment& s) {
  return (s.seq * p.num_kv_heads + s.kv_head) * p.row_tiles + s.row_tile;
}

}  // namespace flashport::turns::decode
