// The line of leaves and its cut: whatever the batch, the tiles and the grid are, every leaf has one block, every block
// knows whose a leaf is, and none owns two parents of a level. Also the divisions by which the line is cut.
#define FLASHPORT_TARGET turns
#define FLASHPORT_TARGET_HEADER "tests/device/decode/turns_target.h"
#include "common/device/decode/schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <ostream>
#include <random>
#include <utility>
#include <vector>

namespace flashport::turns::decode {

struct Launch {
  std::vector<std::int32_t> lengths;
  int kv_heads, row_tiles;
  std::int64_t grid;
  std::int64_t window = -1;
  int tiles() const { return kv_heads * row_tiles; }
};

std::ostream& operator<<(std::ostream& out, const Launch& launch) {
  out << launch.kv_heads << " heads x " << launch.row_tiles << " row tiles, grid " << launch.grid << ", window "
      << launch.window << ", lengths";
  for (const std::int32_t length : launch.lengths) out << ' ' << length;
  return out;
}

namespace {

constexpr int kMost = std::numeric_limits<std::int32_t>::max();

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

DecodeParams params_of(const Launch& launch) {
  DecodeParams p{};
  p.batch = static_cast<std::int32_t>(launch.lengths.size());
  p.num_kv_heads = launch.kv_heads;
  p.row_tiles = launch.row_tiles;
  p.by_row_tiles = make_divisor(launch.row_tiles);
  p.max_q_len = 1;
  p.cache.seqlens = {launch.lengths.data(), 0};
  p.cache.max_len = *std::max_element(launch.lengths.begin(), launch.lengths.end());
  p.window_left = launch.window;
  p.window_right = -1;
  p.cuts[0] = line_cut(launch.tiles(), launch.grid, 1);
  p.cuts[1] = line_cut(launch.tiles(), launch.grid, tile_group(launch.tiles(), launch.grid));
  return p;
}

Range range_of(const DecodeParams& p, std::int64_t block, std::int64_t grid) {
  Wave wave;
  std::vector<Range> ranges(kWaveSize);
  decltype(wave.told) before;
  do {
    before = wave.told;
    for (int lane = 0; lane < kWaveSize; ++lane) ranges[lane] = block_range(p, Block(block, grid, lane, wave));
  } while (wave.told != before);
  for (const Range& range : ranges) {
    const Segment &s = range.segment, &first = ranges[0].segment;
    EXPECT_TRUE(range.end == ranges[0].end && s.seq == first.seq && s.start == first.start && s.first == first.first &&
                s.last == first.last && s.kv_head == first.kv_head && s.row_tile == first.row_tile);
  }
  return ranges[0];
}

// What ranges come to that random launches must have met.
struct Seen {
  int side_by_side = 0, whole_nodes = 0, leaves = 0;
  int begins_at_first_leaf = 0, ends_in_opening = 0, idle = 0;
};

// A block's leaves of a tile.
struct Part {
  std::int64_t block;
  Line line;
  Segment segment;
};

class Walk {
 public:
  explicit Walk(const Launch& launch)
      : launch_(launch), p_(params_of(launch)), parts_(launch.lengths.size() * launch.tiles()) {}

  // Walks through the ranges of all blocks.
  void run(Seen& seen) {
    for (std::int64_t block = 0; block < launch_.grid; ++block) {
      const Range range = range_of(p_, block, launch_.grid);
      LeafCursor now(range);
      if (now.done()) ++seen.idle;
      while (!now.done()) {
        const Segment s = now.segment;
        ASSERT_EQ(now.leaf, s.first);
        ASSERT_TRUE(s.kv_head >= 0 && s.kv_head < p_.num_kv_heads && s.row_tile >= 0 && s.row_tile < p_.row_tiles);
        parts_.at(s.seq * launch_.tiles() + s.kv_head * p_.row_tiles + s.row_tile).push_back({block, range.line, s});
        if (s.last - s.first > 100) now.leaf = s.last - 2;
        for (; now.leaf < s.last - 1; now.next(p_)) ASSERT_EQ(now.segment.start, s.start);
        now.next(p_);
      }
      count(seen, range, now);
    }
  }

  // Every leaf once, and by the block that all who share the tile take for its owner.
  void check() const {
    std::map<std::pair<std::int64_t, int>, std::pair<int, int>> parents;  // of an owner's level: (tile, first leaf)
    for (int tile = 0; tile < static_cast<int>(parts_.size()); ++tile) {
      const std::vector<Part>& parts = parts_[tile];
      ASSERT_FALSE(parts.empty()) << "tile " << tile;
      const std::int64_t length = launch_.lengths[tile / launch_.tiles()];
      const std::int64_t unseen = launch_.window < 0 ? 0 : std::max<std::int64_t>(length - 1 - launch_.window, 0);
      int next = 0;
      for (const Part& part : parts) {
        ASSERT_EQ(part.segment.first, next) << "tile " << tile << ", block " << part.block;
        ASSERT_EQ(part.segment.start, parts[0].segment.start);
        next = part.segment.last;
        for (const Part& other : parts) {
          if (&part - &other > 3 || &other - &part > 3) continue;
          for (const int leaf :
               {other.segment.first, (other.segment.first + other.segment.last) / 2, other.segment.last - 1}) {
            ASSERT_EQ(owner(part, leaf), other.block) << "tile " << tile << ", leaf " << leaf;
          }
        }
        for (int level = 1; level <= 6; ++level) {
          const int first = part.segment.first >> 4 * level << 4 * level;
          if (first == part.segment.first) continue;
          const auto [place, inserted] = parents.try_emplace({owner(part, first), level}, tile, first);
          ASSERT_EQ(place->second, std::pair(tile, first)) << "block " << place->first.first << ", level " << level;
        }
      }
      ASSERT_EQ(next, std::max<std::int64_t>(tree_leaves(length - unseen / kLeafKeys * kLeafKeys), 1));
    }
  }

 private:
  std::int64_t owner(const Part& part, int leaf) const {
    const int stretch = stretch_of(p_, part.line, part.segment, leaf);
    const std::int64_t group = p_.cuts[part.line.cut].group.value;
    return stretch * group + part.block % group;
  }

  void count(Seen& seen, const Range& range, const LeafCursor& last) const {
    const LineCut& cut = p_.cuts[range.line.cut];
    if (cut.group.value > 1) ++seen.side_by_side;
    ++(range.line.unit == 1 ? seen.leaves : seen.whole_nodes);
    if (range.segment.first == range.segment.last || range.line.unit > 1) return;
    const Segment& s = range.segment;
    const int begin = s.first > 0 ? s.start + unit_of_leaf(s.first, 1) : s.start;
    const int stretch = stretch_of(p_, range.line, s, s.first);
    if (stretch_begin(p_, range.line, stretch) == begin + 1) ++seen.begins_at_first_leaf;
    const Segment& end = last.segment;
    if (range.end > end.start + units_of(end.leaves, 1)) ++seen.ends_in_opening;
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
  if (!testing::Test::HasFatalFailure()) walk.check();
}

TEST(Schedule, EveryLeafHasOneBlockThatAllKnow) {
  constexpr std::int32_t kLengths[] = {0, 1, 63, 64, 65, 128, 200, 1023, 1024, 1025, 5000, 16384, 16385, 131072};
  constexpr int kWaveSizes[] = {1, 3, 16, 32, 64};
  constexpr int kGrids[] = {1, 2, 3, 7, 8, 13, 16, 33, 64, 132, 264};
  std::mt19937 random(2);
  const auto pick = [&](const auto& from) { return from[random() % std::size(from)]; };
  Seen seen;
  for (int round = 0; round < 3000 && !HasFatalFailure(); ++round) {
    Launch launch{{}, static_cast<int>(1 + random() % 9), static_cast<int>(1 + random() % 3), pick(kGrids)};
    if (round % 5 == 0) launch.window = pick(kLengths);
    const std::size_t shortest = random() % 2 == 0 ? 0 : random() % std::size(kLengths);
    launch.lengths.resize(1 + random() % (round % 10 == 0 ? 80 : 6));
    for (std::int32_t& length : launch.lengths) {
      length = kLengths[shortest > 0 ? shortest : random() % (std::size(kLengths) - 3 * (round % 2))];
      if (random() % 4 == 0) length = static_cast<std::int32_t>(random() % 3000);
    }
    check(launch, pick(kWaveSizes), seen);
  }
  EXPECT_GT(seen.side_by_side, 100);
  EXPECT_GT(seen.whole_nodes, 100);
  EXPECT_GT(seen.leaves, 100);
  EXPECT_GT(seen.begins_at_first_leaf, 100);
  EXPECT_GT(seen.ends_in_opening, 100);
  EXPECT_GT(seen.idle, 100);
}

// Lines up to the longest (kLongestLine), whose places fit 32 bits only as nodes.
TEST(Schedule, LinesMayBeLong) {
  Seen seen;
  constexpr std::int32_t kLongest = 0x7fff0000;
  check({std::vector<std::int32_t>(15, kLongest), 32, 1, 264}, 4, seen);
  check({std::vector<std::int32_t>(15, kLongest), 4, 8, 1}, 32, seen);
  check({{kLongest, 1, kLongest, 0, 70}, 3, 1, 1000}, 4, seen);
  check({{kLongest, kLongest - 5}, 1, 1, 32768 / 5}, 4, seen);
  check({{70, kLongest}, 500, 1, 264}, 4, seen);
  EXPECT_GT(seen.whole_nodes, 0);
}

// Many short sequences, whose leaves and openings are too many for 32 bits where their nodes are not.
TEST(Schedule, LongLinesAreCountedInNodes) {
  Seen seen;
  kWaveSize = 32;
  const Launch launch{std::vector<std::int32_t>(16000, 5 * kLeafKeys), 65537, 1, 264};
  const Range range = range_of(params_of(launch), 100, launch.grid);
  EXPECT_EQ(range.line.unit, kFanOut);
  EXPECT_EQ(range.end, std::int64_t{16000} * 65537 * 101 / 264);
}

TEST(Schedule, ChunksCoverEveryKeyOnce) {
  std::vector<std::int32_t> lengths = {0, 1, 64, 65, 1000, 5000};
  for (const int keys : {0, 64, 192, 1024}) {
    DecodeParams p = params_of({lengths, 2, 3, 1});
    p.cache.seqlens.data = lengths.data();
    p.num_chunks = keys == 0 ? 7 : (5000 + keys - 1) / keys;
    p.chunk_keys = keys;
    p.write_empty_chunks = keys == 0 ? 1 : 0;
    const std::int64_t grid = std::int64_t{p.batch} * 6 * p.num_chunks;
    for (std::int64_t block = 0; block < grid; ++block) {
      const std::int64_t chunk = block % p.num_chunks;
      const std::int64_t tile = block / p.num_chunks % 6;
      const int seq = static_cast<int>(block / p.num_chunks / 6);
      const std::int64_t leaves = std::max<std::int64_t>(tree_leaves(lengths[seq]), 1);
      const std::int64_t size = keys > 0 ? keys : (leaves + p.num_chunks - 1) / p.num_chunks * kLeafKeys;
      LeafCursor now(range_of(p, block, grid));
      const Segment s = now.segment;
      EXPECT_EQ(s.seq, seq);
      EXPECT_EQ(s.kv_head * 3 + s.row_tile, tile);
      EXPECT_EQ(s.key_begin, std::min<std::int64_t>(chunk * size, lengths[seq]));
      EXPECT_EQ(s.key_high, std::min<std::int64_t>((chunk + 1) * size, lengths[seq]));
      int walked = 0;
      for (; !now.done(); now.next(p)) ++walked;
      EXPECT_EQ(walked, s.key_begin < s.key_high ? tree_leaves(s.key_high - s.key_begin) : p.write_empty_chunks);
      EXPECT_EQ(now.segment.start, s.start);
    }
  }
}

}  // namespace
}  // namespace flashport::turns::decode
