// The numbers of docs/decode-schedule.md: how a batch of three requests is cut, who publishes and who combines.
#include "tests/device/decode/launch_model.h"

#include <gtest/gtest.h>

#include <array>
#include <utility>
#include <vector>

namespace flashport::turns::decode {
namespace {

// Requests A, B and C, eight kv heads, and a block for each of 132 multiprocessors.
const Launch kPage{.lengths = {20000, 3000, 9000}, .kv_heads = 8, .row_tiles = 1, .grid = 132};

TEST(SchedulePage, ChunksOfEachRequest) {
  const ChunkRule rule{chunk_target_shift(kPage.kv_heads), 0};
  constexpr std::array kLeaves = {313, 47, 141}, kChunkLeaves = {16, 4, 16}, kChunks = {20, 12, 9};
  for (int seq = 0; seq < 3; ++seq) {
    EXPECT_EQ(leaves_of(kPage.lengths[seq]), kLeaves[seq]);
    EXPECT_EQ(1 << chunk_shift(kLeaves[seq], rule), kChunkLeaves[seq]);
    EXPECT_EQ((kLeaves[seq] + kChunkLeaves[seq] - 1) / kChunkLeaves[seq], kChunks[seq]);
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
      {8192, {512, 16}, {64, 128}},
      {16384, {1024, 16}, {128, 128}},
      {131072, {1024, 128}, {1024, 128}},
      {262144, {2048, 128}, {2048, 128}},
  };
  for (const Row& row : rows) {
    const auto leaves = static_cast<int>(leaves_of(row.keys));
    for (const auto& [heads, expected] : {std::pair{8, row.of_eight_heads}, {1, row.of_one}}) {
      const int shift = chunk_shift(leaves, {chunk_target_shift(heads), 0});
      EXPECT_EQ(kLeafKeys << shift, expected[0]) << row.keys;
      EXPECT_EQ((leaves + (1 << shift) - 1) >> shift, expected[1]) << row.keys;
    }
  }
}

// Request, its chunks [begin, end).
using Part = std::array<int, 3>;

TEST(SchedulePage, WorkRanges) {
  const std::vector<std::vector<Part>> ranges = {
      {{0, 0, 2}},   {{0, 2, 4}},
      {{0, 4, 6}},   {{0, 6, 8}},
      {{0, 8, 10}},  {{0, 10, 12}},
      {{0, 12, 14}}, {{0, 14, 16}},
      {{0, 16, 18}}, {{0, 18, 20}, {1, 0, 2}},
      {{1, 2, 10}},  {{1, 10, 12}, {2, 0, 2}},
      {{2, 2, 4}},   {{2, 4, 6}},
      {{2, 6, 8}},   {{2, 8, 9}},
  };
  const std::vector<int> leaves = {32, 32, 32, 32, 32, 32, 32, 32, 32, 33, 32, 39, 32, 32, 32, 13};
  const DecodeParams p = params_of(kPage);
  kWaveSize = 32;
  for (std::int64_t block = 0; block < kPage.grid; ++block) {
    const Range range = range_of(p, block, kPage.grid);
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

// Request B and head 3: three blocks publish nine results, and count to twelve at the counter of the first.
TEST(SchedulePage, ResultsOfRequestB) {
  const DecodeParams p = params_of(kPage);
  EXPECT_EQ(p.side_partials, 20);
  kWaveSize = 32;
  const std::array<std::vector<int>, 3> kResults = {{{0, 1}, {0, 1, 2, 2, 2, 2, 3, 4}, {0, 1}}};  // of each chunk
  int part = 0;
  for (const std::int64_t block : {75, 83, 91}) {
    const Range range = range_of(p, block, kPage.grid);
    for_each_segment(p, range, [&](const Segment& s) {
      if (s.seq != 1) return;
      const int begin = s.chunks_before(s.first), end = s.chunks_before(s.last);
      std::vector<int> results;
      for (int chunk = begin; chunk < end; ++chunk) {
        const int first = chunk >= 4 && chunk < 8 ? 4 : chunk;  // the one group that a block holds whole
        results.push_back(partial_index(begin, end, 12, first));
      }
      EXPECT_EQ(results, kResults[part]);
      Wave wave;
      EXPECT_EQ(block_of(p, Block(block, kPage.grid, 0, wave), range.line, s, 0), 75);
    });
    ++part;
  }
}

}  // namespace
}  // namespace flashport::turns::decode
