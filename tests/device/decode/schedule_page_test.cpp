// The numbers of docs/decode-schedule.md: how a batch of three requests is cut, which block publishes and which
// combines.
#include "tests/device/decode/launch_model.h"

#include <gtest/gtest.h>

#include <array>
#include <utility>
#include <vector>

namespace flashport::turns::decode {
namespace {

// Requests A, B and C, eight kv heads, and a block for each of 132 multiprocessors.
const Launch kPage{.lengths = {6500, 3000, 22000}, .kv_heads = 8, .row_tiles = 1, .grid = 132};

TEST(SchedulePage, ChunksOfEachRequest) {
  const ChunkRule rule{chunk_target_shift(kPage.kv_heads), 0, false};
  constexpr std::array kLeaves = {102, 47, 344}, kChunkLeaves = {8, 4, 16}, kChunks = {13, 12, 22};
  constexpr std::array kOnLine = {104, 48, 352};
  for (int seq = 0; seq < 3; ++seq) {
    EXPECT_EQ(leaves_of(kPage.lengths[seq]), kLeaves[seq]);
    EXPECT_EQ(chunk_size(kLeaves[seq], rule).leaves, kChunkLeaves[seq]);
    EXPECT_EQ((kLeaves[seq] + kChunkLeaves[seq] - 1) / kChunkLeaves[seq], kChunks[seq]);
    EXPECT_EQ(chunk_size(kLeaves[seq], rule).whole(kLeaves[seq]), kOnLine[seq]);
  }
}

TEST(SchedulePage, ChunksByLength) {
  struct Row {
    int keys;
    std::array<int, 2> of_eight_heads, of_one;  // keys of a chunk, chunks
  };
  const Row rows[] = {
      {1, {64, 1}, {64, 1}},
      {64, {64, 1}, {64, 1}},
      {1024, {64, 16}, {64, 16}},
      {2048, {128, 16}, {64, 32}},
      {8192, {512, 16}, {128, 64}},
      {10240, {640, 16}, {256, 40}},
      {16384, {1024, 16}, {256, 64}},
      {131072, {1024, 128}, {1024, 128}},
      {262144, {2048, 128}, {2048, 128}},
  };
  for (const Row& row : rows) {
    const auto leaves = static_cast<int>(leaves_of(row.keys));
    for (const auto& [heads, expected] : {std::pair{8, row.of_eight_heads}, {1, row.of_one}}) {
      const ChunkSize chunk = chunk_size(leaves, {chunk_target_shift(heads), 0, false});
      EXPECT_EQ(kLeafKeys * chunk.leaves, expected[0]) << row.keys;
      EXPECT_EQ(chunk.count(leaves), expected[1]) << row.keys;
    }
  }
}

// Request, its chunks [begin, end).
using Part = std::array<int, 3>;

TEST(SchedulePage, WorkRanges) {
  const std::vector<std::vector<Part>> ranges = {
      {{0, 0, 4}},
      {{0, 4, 8}},
      {{0, 8, 12}},
      {{0, 12, 13}, {1, 0, 6}},
      {{1, 6, 12}, {2, 0, 1}},
      {{2, 1, 3}},
      {{2, 3, 5}},
      {{2, 5, 7}},
      {{2, 7, 9}},
      {{2, 9, 11}},
      {{2, 11, 13}},
      {{2, 13, 15}},
      {{2, 15, 17}},
      {{2, 17, 19}},
      {{2, 19, 21}},
      {{2, 21, 22}},
  };
  const std::vector<int> leaves = {32, 32, 32, 30, 39, 32, 32, 32, 32, 32, 32, 32, 32, 32, 32, 8};
  const DecodeParams p = params_of(kPage);
  kWaveSize = 32;
  for (std::int64_t block = 0; block < kPage.grid; ++block) {
    const Range range = range_of(p, block, kPage.grid);
    EXPECT_EQ(range.line.leaves, 504);
    EXPECT_EQ(range.line.quota, 32);
    EXPECT_EQ(p.cuts[range.line.cut].concurrent.value, 8u);
    EXPECT_EQ(p.cuts[range.line.cut].ranges.value, 16u);
    std::vector<Part> parts;
    int work = 0;
    for_each_segment(p, range, [&](const Segment& s) {
      EXPECT_EQ(s.kv_head, block % 8);
      parts.push_back({s.seq, s.chunks_before(s.first), s.chunks_before(s.last)});
      work += s.last - s.first;
    });
    if (block / 8 == 16) {
      EXPECT_TRUE(parts.empty());  // four blocks are idle
      continue;
    }
    EXPECT_EQ(parts, ranges[block / 8]) << "block " << block;
    EXPECT_EQ(work, leaves[block / 8]) << "block " << block;
  }
}

// Request B and head 3: two blocks publish six results, and count to twelve at the counter of the first.
TEST(SchedulePage, ResultsOfRequestB) {
  const DecodeParams p = params_of(kPage);
  EXPECT_EQ(p.side_partials, 22);
  kWaveSize = 32;
  struct Share {
    std::int64_t block;
    int group;                 // the one that the block holds whole
    std::vector<int> results;  // of each chunk
  };
  const Share shares[] = {{27, 0, {0, 0, 0, 0, 1, 2}}, {35, 2, {0, 1, 2, 2, 2, 2}}};
  for (const Share& share : shares) {
    const Range range = range_of(p, share.block, kPage.grid);
    std::vector<int> results;
    for_each_segment(p, range, [&](const Segment& s) {
      if (s.seq != 1) return;
      const int begin = s.chunks_before(s.first), end = s.chunks_before(s.last);
      for (int chunk = begin; chunk < end; ++chunk) {
        const int first = chunk / kGroupChunks == share.group ? share.group * kGroupChunks : chunk;
        results.push_back(partial_index(begin, end, 12, first));
      }
      Wave wave;
      EXPECT_EQ(block_of(p, Block(share.block, kPage.grid, 0, wave), range.line, s, 0), 27);
    });
    EXPECT_EQ(results, share.results) << "block " << share.block;
  }
}

// Sixteen requests like B on 264 blocks: each tile falls to two blocks, half its chunks to each.
TEST(SchedulePage, RequestsOfEqualLength) {
  const Launch equal{.lengths = std::vector<std::int32_t>(16, 3000), .kv_heads = 8, .row_tiles = 1, .grid = 264};
  const DecodeParams p = params_of(equal);
  kWaveSize = 32;
  for (std::int64_t block = 0; block < equal.grid; ++block) {
    const Range range = range_of(p, block, equal.grid);
    EXPECT_EQ(range.line.leaves, 768);
    EXPECT_EQ(range.line.quota, 24);
    std::vector<Part> parts;
    for_each_segment(p, range, [&](const Segment& s) {
      parts.push_back({s.seq, s.chunks_before(s.first), s.chunks_before(s.last)});
    });
    if (block / 8 == 32) {
      EXPECT_TRUE(parts.empty());  // eight blocks are idle
      continue;
    }
    const int number = static_cast<int>(block / 8), half = number % 2;
    EXPECT_EQ(parts, (std::vector<Part>{{number / 2, 6 * half, 6 * half + 6}})) << "block " << block;
  }
}

}  // namespace
}  // namespace flashport::turns::decode
