// A simulation of the schedule over random batches: every chunk has one block, chunks are the same whatever the grid,
// and blocks have nearly equal work: for sequences of equal length as equal as whole chunks may be.
#include "tests/device/decode/launch_model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

namespace flashport::turns::decode {
namespace {

// Batch 1 to 256, lengths from 0 to 128k with equal odds for every factor.
Launch random_launch(std::mt19937& random) {
  Launch launch{{}, static_cast<int>(1 + random() % 8), static_cast<int>(1 + random() % 2), 0};
  launch.lengths.resize(1 + random() % 256);
  for (std::int32_t& length : launch.lengths) {
    length = static_cast<std::int32_t>(std::pow(131073.0, static_cast<double>(random()) * 0x1p-32)) - 1;
  }
  return launch;
}

struct Work {
  std::int64_t leaves = 0;  // of all tiles
  std::int64_t chunks = 0;
  std::int64_t on_line = 0;  // leaves of whole chunks
  std::int64_t blocks = 0;   // that the cut of the line has
  int longest_chunk = 0;
  int quota = 0;
  int longest_block = 0;  // in leaves
  int fullest_block = 0;  // in chunks
};

// Walks through all ranges of a launch; fails where a chunk is lost, cut, or in two of them.
Work walk(const Launch& launch) {
  const DecodeParams p = params_of(launch);
  Work work;
  std::vector<int> done(launch.lengths.size() * launch.tiles(), 0);  // leaves of each tile
  for (std::int64_t block = 0; block < launch.grid; ++block) {
    const Range range = range_of(p, block, launch.grid);
    work.quota = range.line.quota;
    const LineCut& cut = p.cuts[range.line.cut];
    work.blocks = std::int64_t{cut.ranges.value} * cut.concurrent.value;
    int mine = 0, my_chunks = 0;
    for_each_segment(p, range, [&](const Segment& s) {
      int& before = done.at(tile_index(p, s));
      EXPECT_EQ(s.first, before);
      EXPECT_EQ(s.first % s.chunk.leaves, 0);
      EXPECT_TRUE(s.last == s.leaves || s.last % s.chunk.leaves == 0);
      before = s.last;
      mine += s.last - s.first;
      my_chunks += s.chunks_before(s.last) - s.chunks_before(s.first);
    });
    work.longest_block = std::max(work.longest_block, mine);
    work.fullest_block = std::max(work.fullest_block, my_chunks);
  }
  for (std::size_t tile = 0; tile < done.size(); ++tile) {
    const int leaves = leaves_of_tile(launch, launch.lengths[tile / launch.tiles()]);
    EXPECT_EQ(done[tile], leaves) << "tile " << tile;
    work.leaves += leaves;
    const ChunkSize chunk = chunk_size(leaves, p.chunk_rule);
    work.on_line += chunk.whole(leaves);
    work.chunks += chunk.count(leaves);
    work.longest_chunk = std::max(work.longest_chunk, std::min(leaves, chunk.leaves));
  }
  return work;
}

// A block may end with a chunk that begins in its last leaf of the line. So the ideal is what each of them has if all
// have the same, and one chunk that cannot be cut but for its first leaf; where chunks are short for a block's work,
// that is the equal share itself, of the line's whole chunks. The last chunks of tiles have fewer leaves than that.
TEST(Balance, OfRandomBatches) {
  std::mt19937 random(19);
  int fine = 0;  // launches with short chunks
  double sum = 0.0;
  int launches = 0;
  for (int round = 0; round < 1000 && !HasFailure(); ++round) {
    Launch launch = random_launch(random);
    for (const std::int64_t grid : {132, 264, 528}) {
      launch.grid = grid;
      SCOPED_TRACE(testing::PrintToString(launch));
      kWaveSize = round % 20 == 0 ? 32 : 1;
      const Work work = walk(launch);
      const double share = static_cast<double>(work.leaves) / static_cast<double>(grid);
      EXPECT_LE(work.longest_block, work.quota + work.longest_chunk - 1);
      EXPECT_LE(work.longest_block, 1.1 * (share + work.longest_chunk - 1) + 1);
      if (share >= 12 * work.longest_chunk) {
        EXPECT_LE(work.longest_block, 1.1 * static_cast<double>(work.on_line) / static_cast<double>(grid));
        EXPECT_LE(work.longest_block, 1.12 * share);
        ++fine;
      }
      sum += work.longest_block / std::max<double>(share, work.longest_chunk);
      ++launches;
    }
  }
  EXPECT_GT(fine, launches / 2);
  EXPECT_LE(sum / launches, 1.1);  // of what no schedule of these chunks can be below
}

// All chunks begin at multiples of their length on the line, so that no schedule could give its fullest block fewer of
// them. Only a quota of chunks of one or two leaves is rounded up beyond that, by an eighth at most.
TEST(Balance, OfEqualLengths) {
  std::mt19937 random(23);
  int cut_tiles = 0, long_chunks = 0;  // launches with these
  for (int round = 0; round < 1000 && !HasFailure(); ++round) {
    Launch launch = random_launch(random);
    std::fill(launch.lengths.begin(), launch.lengths.end(), launch.lengths[0]);
    for (const std::int64_t grid : {132, 264, 528}) {
      launch.grid = grid;
      SCOPED_TRACE(testing::PrintToString(launch));
      kWaveSize = round % 20 == 0 ? 32 : 1;
      const Work work = walk(launch);
      const std::int64_t share = (work.chunks + work.blocks - 1) / work.blocks;  // in chunks
      if (work.longest_chunk >= 4) {
        EXPECT_EQ(work.fullest_block, share);
        ++long_chunks;
      } else {
        EXPECT_LE(8 * work.fullest_block, 9 * share);
      }
      const std::int64_t tiles = std::ssize(launch.lengths) * launch.tiles();
      if (work.quota % (work.on_line / tiles) != 0) ++cut_tiles;
    }
  }
  EXPECT_GT(cut_tiles, 1000);
  EXPECT_GT(long_chunks, 500);
}

}  // namespace
}  // namespace flashport::turns::decode
