// The arithmetic of chunks and of the workspace: chunks that cover every length, partial results that never meet.
#include "common/device/decode/chunks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <vector>

namespace flashport {
namespace {

int chunks_of(std::int64_t leaves, std::int64_t chunk) { return static_cast<int>((leaves + chunk - 1) / chunk); }

TEST(Chunks, LeavesHoldEveryKey) {
  EXPECT_EQ(leaves_of(0), 0);
  EXPECT_EQ(leaves_of(1), 1);
  EXPECT_EQ(leaves_of(64), 1);
  EXPECT_EQ(leaves_of(65), 2);
}

// What bits depend on: a change here changes results, and docs/numerics.md.
TEST(Chunks, LengthsOfChunks) {
  static_assert(chunk_target_shift(1) == 6 && chunk_target_shift(2) == 6 && chunk_target_shift(3) == 5);
  static_assert(chunk_target_shift(4) == 5 && chunk_target_shift(8) == 4 && chunk_target_shift(32) == 2);
  static_assert(chunk_target_shift(128) == 0 && chunk_target_shift(129) == 0 && chunk_target_shift(1000) == 0);
  const auto leaves_of_chunk = [](int leaves, int heads, int least_shift = 0) {
    return chunk_size(leaves, {chunk_target_shift(heads), least_shift, false}).leaves;
  };
  EXPECT_EQ(leaves_of_chunk(1, 8), 1);
  EXPECT_EQ(leaves_of_chunk(16, 8), 1);
  EXPECT_EQ(leaves_of_chunk(17, 8), 2);
  EXPECT_EQ(leaves_of_chunk(32, 8), 2);
  EXPECT_EQ(leaves_of_chunk(33, 8), 4);
  EXPECT_EQ(leaves_of_chunk(65, 8), 8);
  EXPECT_EQ(leaves_of_chunk(128, 8), 8);
  EXPECT_EQ(leaves_of_chunk(129, 8), 10);
  EXPECT_EQ(leaves_of_chunk(160, 8), 10);
  EXPECT_EQ(leaves_of_chunk(161, 8), 12);
  EXPECT_EQ(leaves_of_chunk(192, 8), 12);
  EXPECT_EQ(leaves_of_chunk(193, 8), 14);
  EXPECT_EQ(leaves_of_chunk(224, 8, 1), 14);
  EXPECT_EQ(leaves_of_chunk(225, 8), 16);
  EXPECT_EQ(leaves_of_chunk(2048, 8), 16);
  EXPECT_EQ(leaves_of_chunk(2049, 8), 32);  // else there were more than 128 chunks
  EXPECT_EQ(leaves_of_chunk(64, 1), 1);
  EXPECT_EQ(leaves_of_chunk(65, 1), 2);
  EXPECT_EQ(leaves_of_chunk(129, 1), 4);
  EXPECT_EQ(leaves_of_chunk(3, 128), 4);
  EXPECT_EQ(leaves_of_chunk(1, 8, 1), 2);  // those of a turn, though the tile has one
  EXPECT_EQ(leaves_of_chunk(17, 8, 1), 2);
}

TEST(Chunks, RulesOfKernels) {
  const auto leaves_of_chunk = [](int leaves, int kv_heads, const DecodeSplit& split) {
    return chunk_size(leaves, chunk_rule(kv_heads, split)).leaves;
  };
  EXPECT_EQ(leaves_of_chunk(1, 8, {}), 1);
  EXPECT_EQ(leaves_of_chunk(1, 8, {.turn_leaves = 2}), 2);
  EXPECT_EQ(leaves_of_chunk(1, 8, {.large = true}), 2);
  EXPECT_EQ(leaves_of_chunk(128, 8, {.turn_leaves = 2}), 8);
  EXPECT_EQ(leaves_of_chunk(128, 8, {.turn_leaves = 2, .finer = true}), 4);
  // With one or two kv heads wide states have half as many chunks up to 128 leaves, and more from 257 on.
  const DecodeSplit wide{.wide = true};
  EXPECT_EQ(leaves_of_chunk(1, 2, wide), 2);
  EXPECT_EQ(leaves_of_chunk(64, 2, wide), 2);
  EXPECT_EQ(leaves_of_chunk(65, 2, wide), 4);
  EXPECT_EQ(leaves_of_chunk(65, 2, {}), 2);
  EXPECT_EQ(leaves_of_chunk(256, 2, wide), 4);
  EXPECT_EQ(leaves_of_chunk(257, 2, wide), 8);
  const DecodeSplit powers{.turn_leaves = 2, .finer = true, .powers = true};
  EXPECT_EQ(leaves_of_chunk(128, 8, powers), 4);
  EXPECT_EQ(leaves_of_chunk(129, 8, powers), 8);
  EXPECT_EQ(leaves_of_chunk(257, 8, powers), 16);
  EXPECT_EQ(leaves_of_chunk(2048, 1, wide), 16);
  EXPECT_EQ(leaves_of_chunk(128, 8, wide), 8);
}

// Kernels that ask for finer chunks have four leaves in place of eight, and six or eight in place of 10 to 16.
TEST(Chunks, LengthsOfFinerChunks) {
  const auto leaves_of_chunk = [](int leaves) { return chunk_size(leaves, {chunk_target_shift(8), 1, true}).leaves; };
  EXPECT_EQ(leaves_of_chunk(1), 2);
  EXPECT_EQ(leaves_of_chunk(33), 4);
  EXPECT_EQ(leaves_of_chunk(64), 4);
  EXPECT_EQ(leaves_of_chunk(65), 4);
  EXPECT_EQ(leaves_of_chunk(128), 4);
  EXPECT_EQ(leaves_of_chunk(129), 6);
  EXPECT_EQ(leaves_of_chunk(192), 6);
  EXPECT_EQ(leaves_of_chunk(193), 8);
  EXPECT_EQ(leaves_of_chunk(256), 8);
  EXPECT_EQ(leaves_of_chunk(257), 16);
  EXPECT_EQ(leaves_of_chunk(2048), 16);
  EXPECT_EQ(leaves_of_chunk(2049), 32);
  for (int target = 0; target <= kMostTargetShift; ++target) {
    const ChunkRule rule{target, 1, true};
    int before = 0, most = 0;
    for (int leaves = 1; leaves <= 5000; ++leaves) {
      const int size = chunk_size(leaves, rule).leaves;
      const int coarse = chunk_size(leaves, {target, 1, false}).leaves;
      ASSERT_GE(size, before) << leaves;
      ASSERT_TRUE(size == coarse || (size == (coarse / 2 + 1) / 2 * 2 && coarse >= 8 && coarse <= 16)) << leaves;
      ASSERT_LE(chunks_of(leaves, size), kMostChunks) << leaves;
      before = size;
      most = std::max(most, chunks_of(leaves, size));
      ASSERT_GE(most_chunks(leaves, rule), most) << "target " << target << ", leaves " << leaves;
    }
  }
}

TEST(Chunks, GrowWithTheTileAndStayWithinTheirNumber) {
  for (int least : {0, 1}) {
    for (int target = 0; target <= kMostTargetShift + 1; ++target) {
      const ChunkRule rule{target, least, false};
      int before = 1 << least;
      int most = 0;
      for (int leaves = 1; leaves <= 5000; ++leaves) {
        const ChunkSize chunk = chunk_size(leaves, rule);
        const int size = chunk.leaves;
        const int chunks = chunks_of(leaves, size);
        ASSERT_GE(size, before) << leaves;
        ASSERT_EQ(size % (1 << least), 0) << leaves;
        ASSERT_LE(chunks, kMostChunks) << leaves;
        // No longer than what one of the rules asks for.
        const int shorter = size <= 8 || size > kMostChunkLeaves ? size / 2 : size - 2;
        const bool many = size > 1 << least && chunks_of(leaves, shorter) > (1 << target);
        ASSERT_TRUE(size == 1 << least || (many && size <= kMostChunkLeaves) ||
                    chunks_of(leaves, shorter) > kMostChunks)
            << leaves;
        ASSERT_TRUE(chunks <= 1 << target || size >= kMostChunkLeaves) << leaves;
        ASSERT_EQ(chunk.count(leaves), chunks) << leaves;
        ASSERT_EQ(chunk.whole(leaves), chunks * size) << leaves;
        ASSERT_LE(chunk.whole(leaves), 2 * leaves) << leaves;  // kLongestLine
        before = size;
        most = std::max(most, chunks);
        ASSERT_GE(most_chunks(leaves, rule), most) << "target " << target << ", leaves " << leaves;
      }
    }
  }
  // The longest tile that there is.
  const ChunkRule rule{7, 0, false};
  const auto longest = static_cast<int>(leaves_of(0x7fff0000));
  const ChunkSize chunk = chunk_size(longest, rule);
  EXPECT_EQ(chunk.count(longest), 128);
  EXPECT_EQ(chunks_of(longest, chunk.leaves), 128);
  EXPECT_EQ(most_chunks(longest, rule), 128);
}

// Of all leaves that a tile with such chunks has, and of more.
TEST(Chunks, NumbersAreExact) {
  for (const bool finer : {false, true}) {
    for (int target = 0; target <= kMostTargetShift; ++target) {
      for (int leaves = 1; leaves <= 17 << target; ++leaves) {
        const ChunkSize chunk = chunk_size(leaves, {target, 0, finer});
        const bool is_power = (chunk.leaves & (chunk.leaves - 1)) == 0;
        for (const int leaf : {leaves / 2, leaves - 1, leaves, is_power ? 100'000'000 + leaves : 4000}) {
          ASSERT_EQ(chunk.number(leaf), leaf / chunk.leaves) << leaf << " / " << chunk.leaves;
          ASSERT_EQ(chunk.count(leaf), chunks_of(leaf, chunk.leaves)) << leaf << " / " << chunk.leaves;
        }
      }
    }
  }
}

// Whatever part of a tile a block has: the results that it publishes are numbered without a gap, in the order of their
// chunks.
TEST(Chunks, ResultsOfAPartAreNumberedInOrder) {
  for (int chunks = 1; chunks <= kMostChunks; chunks += chunks < 21 ? 1 : 7) {
    int most = 0;
    for (int begin = 0; begin < chunks; ++begin) {
      for (int end = begin + 1; end <= chunks; ++end) {
        int next = 0;
        for (int chunk = begin; chunk < end;) {
          ASSERT_EQ(partial_index(begin, end, chunks, chunk), next)
              << "[" << begin << ", " << end << ") of " << chunks << ", chunk " << chunk;
          ++next;
          const int group_end = std::min((chunk / kGroupChunks + 1) * kGroupChunks, chunks);
          chunk = chunk % kGroupChunks == 0 && group_end <= end ? group_end : chunk + 1;
        }
        most = std::max(most, next);
      }
    }
    EXPECT_LE(most, most_partials(chunks)) << chunks;
  }
  EXPECT_EQ(most_partials(3), 3);
  EXPECT_EQ(most_partials(kMostChunks), 38);
}

TEST(Chunks, PlacesNeverMeet) {
  for (int side_partials : {1, 3, 38}) {
    constexpr std::int64_t kBlocks = 5;
    std::set<std::int64_t> numbers;
    for (std::int64_t block = 0; block < kBlocks; ++block) {
      for (int index = 0; index < side_partials; ++index) {
        for (int side : {0, 1}) EXPECT_TRUE(numbers.insert(partial_number(block, side_partials, side, index)).second);
      }
      for (int chunk = 0; chunk < kGroupChunks; ++chunk) {
        EXPECT_TRUE(numbers.insert(group_chunk_number(block, side_partials, chunk)).second);
      }
    }
    EXPECT_EQ(*numbers.begin(), 0);
    constexpr int kFloats = 44;
    EXPECT_LE((*numbers.rbegin() + 1) * kFloats * 4, partials_bytes(kBlocks, side_partials, kFloats));
  }
}

TEST(Chunks, SlicesKeepVectorAlignment) {
  for (int rows : {1, 3, 16, 64}) {
    for (int columns : {64, 128, 512}) {
      EXPECT_EQ(slice_floats(rows, columns) % 4, 0);
      EXPECT_EQ(slice_output_offset(rows) % 4, 0);
      EXPECT_GE(slice_output_offset(rows), 2 * rows);
      EXPECT_EQ(slice_floats(rows, columns), slice_output_offset(rows) + rows * columns);
    }
  }
}

// A multiplier of 32 bits, whatever the divisor: what it divides is tested with the schedule.
TEST(Chunks, DivisorsFitTheirFields) {
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

TEST(Chunks, CutsUseTheWholeGrid) {
  static_assert(line_cut(8, 132, 4, kLeastConcurrentLeaves).ranges.value == 33);
  for (std::int64_t tiles : {1, 2, 6, 7, 8, 24, 40}) {
    for (std::int64_t grid : {1, 2, 7, 8, 16, 100, 132, 264, 304, 528}) {
      const int concurrent = concurrent_tiles(tiles, grid);
      const LineCut cut = line_cut(tiles, grid, concurrent, kLeastConcurrentLeaves);
      EXPECT_EQ(cut.concurrent.value, static_cast<std::uint32_t>(concurrent));
      EXPECT_LE(concurrent, kMostConcurrentTiles);
      EXPECT_EQ(cut.rows * concurrent, tiles);
      EXPECT_GE(cut.ranges.value, 1u);
      EXPECT_LE((grid - cut.ranges.value * concurrent) * 32, grid);
    }
  }
}

// Never shorter, and at most an eighth and few leaves longer.
TEST(Chunks, RoundedQuotas) {
  const auto rounded_to = [](int quota, int leaves) {
    for (const bool finer : {false, true}) {
      const ChunkSize chunk = chunk_size(finer ? 2 * leaves : leaves, {0, 0, finer});
      if (chunk.leaves == leaves) return rounded_quota(quota, chunk);
    }
    ADD_FAILURE() << "no chunks of " << leaves << " leaves";
    return 0;
  };
  for (const int chunk : {1, 2, 4, 6, 8, 10, 12, 14, 16}) {
    for (int quota = 1; quota < 5000; ++quota) {
      const int rounded = rounded_to(quota, chunk);
      ASSERT_GE(rounded, quota);
      ASSERT_LE((rounded - quota) * 8, quota + (chunk > 4 ? 8 : 0)) << quota;
      ASSERT_LE(rounded - quota, std::max(3, chunk - 1)) << quota;
      const int whole = chunks_of(quota, chunk) * chunk;
      if (chunk > 4 && (whole - quota) * (whole <= kFewWholeChunks * chunk ? 8 : 32) <= quota) {
        ASSERT_EQ(rounded, whole) << quota;
      } else if (chunk > 4) {
        ASSERT_EQ(chunks_of(rounded, chunk), chunks_of(quota, chunk)) << quota;
      } else if (quota >= 24) {
        ASSERT_EQ(rounded % 4, 0) << quota;
      }
    }
  }
  EXPECT_EQ(rounded_to(7, 1), 7);
  EXPECT_EQ(rounded_to(15, 1), 16);
  EXPECT_EQ(rounded_to(31, 2), 32);
  EXPECT_EQ(rounded_to(61, 4), 64);
  EXPECT_EQ(rounded_to(36, 10), 40);
  EXPECT_EQ(rounded_to(125, 8), 128);
  EXPECT_EQ(rounded_to(75, 10), 76);
  EXPECT_EQ(rounded_to(31, 10), 32);
  for (const int chunk : {1, 6, 10, 12, 14, 16}) {  // where inverses are not exact any more, too
    for (const int quota : {5461, 8192, 16384, 1'000'000, kLongestLine}) {
      const int rounded = rounded_to(quota, chunk);
      ASSERT_GE(rounded, quota);
      ASSERT_LE((rounded - quota) * 32, quota + 96) << quota;
    }
  }
}

}  // namespace
}  // namespace flashport
