// The line of leaves and its cut: whatever the batch, the tiles and the grid are, every chunk has one block, and every
// block that shares a tile knows whose a chunk is. Also the divisions by which the line is cut.
#include "tests/device/decode/launch_model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

namespace flashport::turns::decode {
namespace {

constexpr int kMost = std::numeric_limits<std::int32_t>::max();

// By a reciprocal that is off by two units in the last place.
TEST(Divide, ByReciprocalsIsExactForQuotientsBelowTwoToTheTwentieth) {
  std::mt19937 random(5);
  for (int i = 0; i < 1'000'000; ++i) {
    const int divisor = std::max(1, static_cast<int>(random() >> (1 + random() % 31)));
    const std::int64_t most =
        std::min<std::int64_t>((std::int64_t{1} << 20) * divisor - 1, kMost - std::int64_t{divisor});
    std::int64_t dividend = most > 0 ? random() % most : 0;
    if (i % 2 == 0) dividend = std::min<std::int64_t>(dividend / divisor * divisor + i / 2 % 3 - 1, most);
    if (dividend < 0) continue;
    const float inverse = reciprocal_approx(static_cast<float>(divisor));
    ASSERT_EQ(divide(static_cast<int>(dividend), divisor, inverse), dividend / divisor) << dividend << " / " << divisor;
  }
}

TEST(Divide, IsExactBelowTwoToTheThirtyFirst) {
  std::mt19937 random(1);
  std::vector<int> values = {1, 3, 5, 6, 7, 11, 13, 127, 641, 1000, 10007, 32749, 32768, 65537, kMost - 1, kMost};
  for (int shift = 1; shift < 31; ++shift) {
    for (int near : {-1, 0, 1}) values.push_back((1 << shift) + near);
  }
  for (int i = 0; i < 2000; ++i) values.push_back(std::max(1, static_cast<int>(random() >> (1 + random() % 31))));
  for (const int value : values) {
    const Divisor divisor = make_divisor(value);
    std::vector<std::int64_t> dividends = {kMost, kMost - 1};
    for (int multiple : {0, 1, 2, kMost / value / 2, kMost / value}) {
      for (int near = -2; near <= 2; ++near) dividends.push_back(std::int64_t{multiple} * value + near);
    }
    for (int i = 0; i < 100; ++i) {
      const int any = static_cast<int>(random() >> 1);
      dividends.push_back(any);
      dividends.push_back(any / value * value - 1);
    }
    for (const std::int64_t dividend : dividends) {
      if (dividend < 0 || dividend > kMost) continue;
      ASSERT_EQ(divide(static_cast<int>(dividend), divisor), dividend / value) << dividend << " / " << value;
    }
  }
}

// What random launches must have met.
struct Seen {
  int concurrent = 0, alone = 0, idle = 0, many_chunks = 0, parts_in_groups = 0, whole = 0, lanes_with_many = 0;
};

// A block's chunks of a tile.
struct Part {
  std::int64_t block;
  Line line;
  Segment segment;
  int begin() const { return segment.chunks_before(segment.first); }
  int end() const { return segment.chunks_before(segment.last); }
};

class Walk {
 public:
  explicit Walk(const Launch& launch)
      : launch_(launch), p_(params_of(launch)), parts_(launch.lengths.size() * launch.tiles()) {}

  // Walks through the ranges of all blocks.
  void run(Seen& seen) {
    if (p_.batch > kWaveSize) ++seen.lanes_with_many;
    for (std::int64_t block = 0; block < launch_.grid; ++block) {
      const Range range = range_of(p_, block, launch_.grid);
      LeafCursor now(range);
      if (now.done()) ++seen.idle;
      while (!now.done()) {
        const Segment s = now.segment;
        ASSERT_EQ(now.leaf, s.first);
        ASSERT_TRUE(s.kv_head >= 0 && s.kv_head < p_.num_kv_heads && s.row_tile >= 0 && s.row_tile < p_.row_tiles);
        parts_.at(tile_index(p_, s)).push_back({block, range.line, s});
        // Its last turn alone where there are many.
        const int turns = (s.last - s.first + launch_.turn_leaves - 1) / launch_.turn_leaves;
        if (turns > 100) now.leaf = s.first + (turns - 2) * launch_.turn_leaves;
        while (now.leaf + launch_.turn_leaves < s.last) {
          now.next(p_, launch_.turn_leaves);
          ASSERT_EQ(now.segment.start, s.start);
        }
        now.next(p_, launch_.turn_leaves);
      }
      ++(p_.cuts[range.line.cut].concurrent.value > 1 ? seen.concurrent : seen.alone);
    }
  }

  // Every chunk whole and once, by the block that all that share the tile take for its owner; results of a block at
  // different places; one counter for each tile that is shared, and no other tile's.
  void check(Seen& seen) const {
    std::set<std::pair<std::int64_t, int>> sides;  // (block, side) that publish
    std::set<std::int64_t> counters;
    for (int tile = 0; tile < static_cast<int>(parts_.size()); ++tile) {
      const std::vector<Part>& parts = parts_[tile];
      ASSERT_FALSE(parts.empty()) << "tile " << tile;
      const int leaves = leaves_of_tile(launch_, launch_.lengths[tile / launch_.tiles()]);
      const int size = chunk_size(leaves, p_.chunk_rule).leaves;
      const int chunks = (leaves + size - 1) / size;
      if (chunks > 100) ++seen.many_chunks;
      int next = 0;
      for (const Part& part : parts) {
        const Segment& s = part.segment;
        ASSERT_EQ(s.leaves, leaves);
        ASSERT_EQ(s.chunk.leaves, size);
        ASSERT_EQ(s.first, next) << "tile " << tile << ", block " << part.block;
        ASSERT_LT(s.first, s.last);
        ASSERT_EQ(s.start, parts[0].segment.start);
        ASSERT_EQ(s.first % size, 0);
        ASSERT_TRUE(s.last == leaves || s.last % size == 0);
        next = s.last;
        check_part(parts, part, chunks, sides, seen);
      }
      ASSERT_EQ(next, leaves);
      if (parts.size() == 1) {
        ++seen.whole;
        continue;
      }
      // The counter of the block that has the first chunk: that block ends in this tile, so that it owns one tile
      // alone.
      ASSERT_TRUE(counters.insert(parts[0].block).second) << "tile " << tile;
    }
  }

 private:
  void check_part(const std::vector<Part>& parts, const Part& part, int chunks,
                  std::set<std::pair<std::int64_t, int>>& sides, Seen& seen) const {
    const Segment& s = part.segment;
    Wave wave;
    const Block block(part.block, launch_.grid, 0, wave);
    for (const Part& other : parts) {
      const auto apart = &part - &other;
      if (apart > 3 || apart < -3) continue;
      for (const int chunk : {other.begin(), (other.begin() + other.end()) / 2, other.end() - 1}) {
        const int leaf = chunk * s.chunk.leaves;
        ASSERT_EQ(block_of(p_, block, part.line, s, leaf), other.block) << "leaf " << leaf;
      }
      // By division, as whoever combines finds the chunks of another block.
      const int begin = part.line.quota * part.line.range_of(s.start + other.segment.first);
      ASSERT_EQ(s.chunks_before(leaves_until(s, s.start, begin)), other.begin());
      ASSERT_EQ(s.chunks_before(leaves_until(s, s.start, begin + part.line.quota)), other.end());
    }
    ASSERT_EQ(block_of(p_, block, part.line, s, 0), parts[0].block);
    if (s.whole()) return;
    ASSERT_TRUE(sides.insert({part.block, part.begin() > 0 ? 0 : 1}).second) << "block " << part.block;
    int last = -1;
    for (int chunk = part.begin(); chunk < part.end(); ++chunk) {
      last = std::max(last, partial_index(part.begin(), part.end(), chunks, chunk));
    }
    ASSERT_LT(last, p_.side_partials);
    if (last + 1 < part.end() - part.begin()) ++seen.parts_in_groups;
  }

  const Launch& launch_;
  DecodeParams p_;
  std::vector<std::vector<Part>> parts_;
};

void check(const Launch& launch, int wave_size, Seen& seen) {
  SCOPED_TRACE(testing::PrintToString(launch));
  kWaveSize = wave_size;
  Walk walk(launch);
  walk.run(seen);
  if (!testing::Test::HasFatalFailure()) walk.check(seen);
}

TEST(Schedule, EveryChunkHasOneBlockThatAllKnow) {
  constexpr std::int32_t kLengths[] = {0,    1,    63,   64,    65,    128,   200,   1023,  1024,
                                       1025, 5000, 9000, 12000, 14000, 16384, 16385, 131072};
  constexpr int kWaveSizes[] = {1, 3, 16, 32, 64};
  constexpr int kGrids[] = {1, 2, 3, 7, 8, 13, 16, 33, 64, 132, 264, 528};
  std::mt19937 random(2);
  const auto pick = [&](const auto& from) { return from[random() % std::size(from)]; };
  Seen seen;
  for (int round = 0; round < 3000 && !HasFatalFailure(); ++round) {
    Launch launch{{}, static_cast<int>(1 + random() % 9), static_cast<int>(1 + random() % 3), pick(kGrids)};
    if (round % 5 == 0) launch.window = pick(kLengths);
    if (round % 3 == 0) launch.turn_leaves = 2;
    if (round % 7 == 0) launch.csr_page = round % 2 == 0 ? 1 : 16;
    const std::size_t shortest = random() % 2 == 0 ? 0 : random() % std::size(kLengths);
    launch.lengths.resize(1 + random() % (round % 10 == 0 ? 80 : 6));
    for (std::int32_t& length : launch.lengths) {
      length = kLengths[shortest > 0 ? shortest : random() % (std::size(kLengths) - 3 * (round % 2))];
      if (random() % 4 == 0) length = static_cast<std::int32_t>(random() % 3000);
    }
    check(launch, pick(kWaveSizes), seen);
  }
  EXPECT_GT(seen.concurrent, 100);
  EXPECT_GT(seen.alone, 100);
  EXPECT_GT(seen.idle, 100);
  EXPECT_GT(seen.many_chunks, 100);
  EXPECT_GT(seen.parts_in_groups, 100);
  EXPECT_GT(seen.whole, 100);
  EXPECT_GT(seen.lanes_with_many, 100);
}

// Lines up to the longest (kLongestLine), whose places just fit 32 bits.
TEST(Schedule, LinesMayBeLong) {
  Seen seen;
  constexpr std::int32_t kLongest = 0x7fff0000;
  check({std::vector<std::int32_t>(2, kLongest), 8, 1, 264}, 4, seen);
  check({std::vector<std::int32_t>(2, kLongest), 4, 2, 1}, 32, seen);
  check({{kLongest, 1, kLongest, 0, 70}, 3, 1, 1000}, 4, seen);
  check({{kLongest, kLongest - 5}, 1, 1, 32768 / 5}, 4, seen);
  check({{70, kLongest}, 15, 1, 264}, 4, seen);
  check({std::vector<std::int32_t>(3000, 5 * kLeafKeys), 64, 1, 264}, 32, seen);
}

// Sequences that fill the device by themselves are not cut.
TEST(Schedule, EqualSequencesThatFillTheDeviceStayWhole) {
  for (const auto& [batch, heads, grid] : {std::tuple{33, 8, 264}, {66, 2, 132}, {132, 1, 132}, {264, 8, 528}}) {
    const Launch launch{std::vector<std::int32_t>(batch, 4096), heads, 1, grid};
    const DecodeParams p = params_of(launch);
    kWaveSize = 32;
    for (std::int64_t block = 0; block < grid; ++block) {
      for_each_segment(p, range_of(p, block, grid), [](const Segment& s) { EXPECT_TRUE(s.whole()); });
    }
  }
}

TEST(Schedule, ChunksCoverEveryKeyOnce) {
  std::vector<std::int32_t> lengths = {0, 1, 64, 65, 1000, 5000};
  for (const int keys : {0, 64, 192, 1024}) {
    const Launch launch{lengths, 2, 3, 1};
    DecodeParams p = params_of(launch);
    p.num_chunks = keys == 0 ? 7 : (5000 + keys - 1) / keys;
    p.chunk_keys = keys;
    p.write_empty_chunks = keys == 0 ? 1 : 0;
    const std::int64_t grid = std::int64_t{p.batch} * 6 * p.num_chunks;
    for (std::int64_t block = 0; block < grid; ++block) {
      const std::int64_t chunk = block % p.num_chunks;
      const std::int64_t tile = block / p.num_chunks % 6;
      const int seq = static_cast<int>(block / p.num_chunks / 6);
      const std::int64_t leaves = std::max<std::int64_t>(leaves_of(lengths[seq]), 1);
      const std::int64_t size = keys > 0 ? keys : (leaves + p.num_chunks - 1) / p.num_chunks * kLeafKeys;
      LeafCursor now(range_of(p, block, grid));
      const Segment s = now.segment;
      EXPECT_EQ(s.seq, seq);
      EXPECT_EQ(s.kv_head * 3 + s.row_tile, tile);
      EXPECT_EQ(s.key_begin, std::min<std::int64_t>(chunk * size, lengths[seq]));
      EXPECT_EQ(s.key_high, std::min<std::int64_t>((chunk + 1) * size, lengths[seq]));
      int walked = 0;
      for (; !now.done(); now.next(p)) ++walked;
      EXPECT_EQ(walked, s.key_begin < s.key_high ? leaves_of(s.key_high - s.key_begin) : p.write_empty_chunks);
      EXPECT_EQ(now.segment.start, s.start);
    }
  }
}

}  // namespace
}  // namespace flashport::turns::decode
