// The combine as a launch of its own against the one inside the launch: equal bits for any cut of the line.
#define FLASHPORT_TARGET cpu_generic
#define FLASHPORT_TARGET_HEADER "cpu/arch/cpu_generic.h"
#include "common/device/decode/combine_kernel.h"
#include "common/device/decode/kernel.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

namespace flashport::cpu_generic::decode {
namespace {

constexpr int kDim = 64;
constexpr DecodeConfig kConfig = decode_config(MathType::kFp32, KvFormat::kFp32, KvFormat::kFp32, kDim, kDim, 16);

struct Case {
  std::vector<std::int32_t> lengths;
  int kv_heads, group;
  std::int64_t grid;
};

struct Result {
  std::vector<float> out, lse;
  bool operator==(const Result&) const = default;
};

Result run(const Case& c, bool second_launch) {
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  const auto batch = static_cast<int>(c.lengths.size());
  const int longest = *std::max_element(c.lengths.begin(), c.lengths.end());
  const int heads = c.kv_heads * c.group;
  const auto filled = [&](std::int64_t count) {
    std::vector<float> x(static_cast<std::size_t>(count));
    for (float& value : x) value = normal(random);
    return x;
  };
  std::vector<float> q = filled(std::int64_t{batch} * heads * kDim);
  // Any sequence has the same keys, and any head the same ones one later.
  std::vector<float> k = filled((longest + c.kv_heads) * kDim), v = filled((longest + c.kv_heads) * kDim);
  Result result{std::vector<float>(q.size()), std::vector<float>(static_cast<std::size_t>(batch * heads))};

  DecodeParams p{};
  p.batch = batch;
  p.num_q_heads = heads;
  p.num_kv_heads = c.kv_heads;
  p.group_size = c.group;
  p.head_dim_qk = p.head_dim_v = kDim;
  p.row_tiles = (c.group + kConfig.shape.rows - 1) / kConfig.shape.rows;
  p.by_group_size = make_divisor(c.group);
  p.by_row_tiles = make_divisor(p.row_tiles);
  p.max_q_len = 1;
  p.q = {q.data(), DType::kFloat32, std::int64_t{heads} * kDim, std::int64_t{heads} * kDim, kDim, 1};
  p.out = p.q;
  p.out.data = result.out.data();
  p.lse = {result.lse.data(), DType::kFloat32, heads, heads, 1, 1};
  const auto side = [&](std::vector<float>& x) {
    const std::int64_t row = kDim * 4;
    return CacheParams{x.data(), 0, row, row, kDim * 4, 16};
  };
  p.cache.seqlens = {c.lengths.data(), 0};
  p.cache.max_len = longest;
  p.cache.page_size = longest;
  p.cache.page_shift = -1;
  p.cache.k = side(k);
  p.cache.v = side(v);
  p.score_scale = 0.2f;
  p.window_left = -1;
  p.clear_right = 1;
  p.chunk_rule = {chunk_target_shift(c.kv_heads), 0, false};
  const int tiles = c.kv_heads * p.row_tiles;
  p.cuts[0] = line_cut(tiles, c.grid, 1, kLeastConcurrentLeaves);
  p.cuts[1] = line_cut(tiles, c.grid, concurrent_tiles(tiles, c.grid), kLeastConcurrentLeaves);
  p.slices = 1;
  const int rows = std::min(kConfig.shape.rows, c.group);
  p.slice_floats = slice_floats(rows, kDim);
  p.side_partials = most_partials(most_chunks(leaves_of(longest), p.chunk_rule));
  std::vector<float> partials(static_cast<std::size_t>(partials_bytes(c.grid, p.side_partials, p.slice_floats) / 4));
  std::vector<std::uint32_t> counters(kCounterCapacity);
  p.partials = partials.data();
  p.counters = counters.data();
  if (second_launch) p.combine = {3, rows, kDim};

  const auto shared = std::make_unique<DecodeShared<kConfig>>();
  for (std::int64_t i = 0; i < c.grid; ++i) {
    const Block block(i, c.grid);
    cpu_generic::decode::decode<kConfig>(p, block_range(p, block), block, *shared);
  }
  const std::int64_t combine_grid = std::int64_t{batch} * tiles * p.combine.parts;
  for (std::int64_t i = 0; i < combine_grid; ++i) {
    CombineShared list;
    decode_combine(p, Block(i, combine_grid), list, [] {});
  }
  EXPECT_EQ(std::accumulate(counters.begin(), counters.end(), 0u), 0u);
  return result;
}

TEST(CombineLaunch, GivesTheBitsOfTheOneInTheLaunch) {
  const std::vector<std::vector<std::int32_t>> batches = {{1000}, {64, 0, 1, 2000, 777}, {2500, 63}};
  for (const auto& lengths : batches) {
    for (int kv_heads : {1, 2}) {
      for (int group : {4, 7}) {
        const Result alone = run({lengths, kv_heads, group, 1}, false);
        for (std::int64_t grid : {1, 3, 16, 100}) {
          const Case c{lengths, kv_heads, group, grid};
          EXPECT_EQ(run(c, false), alone) << "grid " << grid << " heads " << kv_heads << " group " << group;
          EXPECT_EQ(run(c, true), alone) << "grid " << grid << " heads " << kv_heads << " group " << group;
        }
      }
    }
  }
}

}  // namespace
}  // namespace flashport::cpu_generic::decode
