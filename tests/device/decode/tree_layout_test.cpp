// The arithmetic of the merge tree and of its workspace: levels that cover every length, places that never meet.
#include "common/device/decode/chunks.h"

#include <gtest/gtest.h>

#include <set>

namespace flashport {
namespace {

TEST(TreeLayout, LevelsAreTheFewestThatCoverALength) {
  for (std::int64_t length :
       {0ll, 1ll, 64ll, 1023ll, 1024ll, 1025ll, 16384ll, 16385ll, 262144ll, 262145ll, 0x7fff0000ll}) {
    const int levels = tree_levels(length);
    std::int64_t covered = kLeafKeys;
    for (int level = 0; level < levels; ++level) covered *= kFanOut;
    EXPECT_GE(covered, length);
    EXPECT_TRUE(levels == 1 || covered / kFanOut < length) << length;
  }
}

TEST(TreeLayout, LeavesHoldEveryKey) {
  EXPECT_EQ(tree_leaves(0), 0);
  EXPECT_EQ(tree_leaves(1), 1);
  EXPECT_EQ(tree_leaves(64), 1);
  EXPECT_EQ(tree_leaves(65), 2);
}

TEST(TreeLayout, PlacesNeverMeet) {
  for (int levels : {1, 2, 4}) {
    constexpr std::int64_t kBlocks = 5;
    std::set<std::int64_t> slots, counters;
    for (std::int64_t block = 0; block < kBlocks; ++block) {
      for (int level = 1; level <= levels; ++level) {
        for (int child = 0; child < kFanOut; ++child) {
          EXPECT_TRUE(slots.insert(tree_shared_slots(block, levels, level) + child).second);
          EXPECT_TRUE(slots.insert(tree_own_slots(block, levels, level) + child).second);
        }
        EXPECT_TRUE(counters.insert(tree_counter(block, levels, level)).second);
      }
    }
    EXPECT_GE(*slots.begin(), 0);
    EXPECT_LT(*slots.rbegin(), kBlocks * slots_per_block(levels));
    EXPECT_LT(*counters.rbegin(), kBlocks * counters_per_block(levels));
  }
}

TEST(TreeLayout, PlacesOfChunksNeverMeet) {
  for (int levels : {2, 4}) {
    std::set<std::int64_t> slots;
    for (std::int64_t block = 0; block < 5; ++block) {
      for (int level = 2; level <= levels; ++level) {
        for (int child = 0; child < kFanOut; ++child) {
          EXPECT_TRUE(slots.insert(chunk_own_slots(block, levels, level) + child).second);
        }
      }
    }
    EXPECT_EQ(*slots.begin(), 0);
    EXPECT_LT(*slots.rbegin(), 5 * chunk_slots_per_block(levels));
  }
}

// A multiplier of 32 bits, whatever the divisor: what it divides is tested with the schedule.
TEST(TreeLayout, DivisorsFitTheirFields) {
  static_assert(make_divisor(1).multiplier == 1u << 31 && make_divisor(1).shift == 0);
  static_assert(make_divisor(32768).multiplier == 1u << 31 && make_divisor(32768).shift == 15);
  for (std::int64_t value : {1ll, 2ll, 3ll, 7ll, 132ll, 32767ll, 32768ll, 32769ll, 0x7ffffffell, 0x7fffffffll}) {
    const Divisor divisor = make_divisor(value);
    EXPECT_EQ(divisor.value, value);
    EXPECT_LT(divisor.shift, 32u);
    EXPECT_GE(std::int64_t{1} << divisor.shift, value);
    EXPECT_GE(divisor.multiplier, 1u << 31);
  }
}

TEST(TreeLayout, CutsUseTheWholeGrid) {
  static_assert(line_cut(8, 132, 4).stretches.value == 33);
  for (std::int64_t tiles : {1, 2, 6, 7, 8, 24, 40}) {
    for (std::int64_t grid : {1, 2, 7, 8, 100, 132, 264, 304}) {
      const int group = tile_group(tiles, grid);
      const LineCut cut = line_cut(tiles, grid, group);
      EXPECT_EQ(cut.group.value, static_cast<std::uint32_t>(group));
      EXPECT_EQ(cut.groups * group, tiles);
      EXPECT_GE(cut.stretches.value, 1u);
      EXPECT_LE((grid - cut.stretches.value * group) * 32, grid);
    }
  }
}

TEST(TreeLayout, SlotsKeepVectorAlignment) {
  for (std::int64_t rows : {1, 3, 16, 64}) {
    for (std::int64_t dim : {64, 128, 512}) {
      EXPECT_EQ(slot_floats(rows, dim) % 4, 0);
      EXPECT_EQ(slot_output_offset(rows) % 4, 0);
      EXPECT_GE(slot_floats(rows, dim), rows * (dim + 2));
    }
  }
}

}  // namespace
}  // namespace flashport
