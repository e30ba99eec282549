// The arithmetic of the merge tree and of its workspace: levels that cover every length, places that never meet.
#include "common/device/tree_layout.h"

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
