// The invariant schedule: a request's bits do not depend on its neighbours, on how many multiprocessors work, on the
// call being the first or the tenth, or on the other query tokens of its tile.
#include <gtest/gtest.h>

#include <flashport/backend.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <map>
#include <utility>

#include "common/device/decode/chunks.h"
#include "tests/ops/decode/call.h"
#include "tests/ops/decode/request_pool.h"
#include "tests/support/expected_support.h"
#include "tests/support/random.h"

namespace flashport_test {
namespace {

using reference::Type;

const PoolShape kShapes[] = {
    {"bitwise_bf16_bf16_d128", Type::kBF16, Type::kBF16, 128, 128, 8, 2, 16, 1},
    {"bitwise_fp16_fp16_d64_q4", Type::kF16, Type::kF16, 64, 64, 4, 2, 3, 4},
    {"bitwise_bf16_bf16_d192x128_g16_q2", Type::kBF16, Type::kBF16, 192, 128, 16, 1, 64, 2},
    {"bitwise_fp16_fp16_d512", Type::kF16, Type::kF16, 512, 512, 8, 1, 16, 1},
    {"bitwise_bf16_fp8_e4m3_d128_g16_q3", Type::kBF16, Type::kE4M3, 128, 128, 16, 1, 16, 3},
    {"bitwise_fp16_q8_0_d256", Type::kF16, Type::kQ8_0, 256, 256, 4, 1, 1, 1},
    {"bitwise_bf16_q8_0_d128_hkv4", Type::kBF16, Type::kQ8_0, 128, 128, 8, 4, 16, 1},  // heads that are copied together
    {"bitwise_bf16_q8_0_d128_hkv3", Type::kBF16, Type::kQ8_0, 128, 128, 6, 3, 16, 1},  // and that are not
    {"bitwise_bf16_q4_0_d128_hkv4", Type::kBF16, Type::kQ4_0, 128, 128, 8, 4, 16, 1},
    {"bitwise_bf16_q4_0_d128_hkv3", Type::kBF16, Type::kQ4_0, 128, 128, 6, 3, 16, 1},
    {"bitwise_bf16_bf16_d128_g43_q2", Type::kBF16, Type::kBF16, 128, 128, 43, 1, 16, 2},
    {"bitwise_fp32_fp32_d96", Type::kF32, Type::kF32, 96, 96, 4, 2, 16, 1},
    // Plain calls, which have kernels of their own; ragged ones have not.
    {"bitwise_plain_bf16_d64_hkv1", Type::kBF16, Type::kBF16, 64, 64, 8, 1, 16, 1, false},
    {"bitwise_plain_bf16_d128", Type::kBF16, Type::kBF16, 128, 128, 8, 2, 16, 1, false},
    {"bitwise_plain_fp16_d128_q4", Type::kF16, Type::kF16, 128, 128, 8, 2, 1, 4, false},
    {"bitwise_plain_bf16_d128_g64", Type::kBF16, Type::kBF16, 128, 128, 64, 1, 16, 1, false},
    {"bitwise_plain_bf16_d64_g71", Type::kBF16, Type::kBF16, 64, 64, 71, 1, 16, 1, false},
    {"bitwise_plain_bf16_d256", Type::kBF16, Type::kBF16, 256, 256, 8, 1, 16, 1, false},
    {"bitwise_plain_bf16_fp8_e4m3_d128", Type::kBF16, Type::kE4M3, 128, 128, 8, 1, 16, 1, false},
    {"bitwise_plain_bf16_q8_0_d128", Type::kBF16, Type::kQ8_0, 128, 128, 8, 4, 16, 1, false},
    {"bitwise_plain_bf16_q4_0_d128", Type::kBF16, Type::kQ4_0, 128, 128, 8, 4, 16, 1, false},
    {"bitwise_plain_bf16_q8_0_q4_0_d128", Type::kBF16, Type::kQ8_0, 128, 128, 8, 4, 16, 1, false, 0, Type::kQ4_0},
    // Caches that are large in batches, but not in calls of one request: the two have different kernels.
    {"bitwise_plain_bf16_d64_large_hkv2", Type::kBF16, Type::kBF16, 64, 64, 8, 2, 16, 1, false, 600'000},
    {"bitwise_plain_fp16_d64_large_hkv8", Type::kF16, Type::kF16, 64, 64, 32, 8, 1, 1, false, 150'000},
    {"bitwise_plain_bf16_q8_0_d128_large_hkv4", Type::kBF16, Type::kQ8_0, 128, 128, 16, 4, 16, 1, false, 60'000},
    {"bitwise_plain_bf16_q4_0_d128_large_hkv8", Type::kBF16, Type::kQ4_0, 128, 128, 8, 8, 1, 1, false, 30'000},
    {"bitwise_plain_bf16_q8_0_q4_0_d128_large_hkv4", Type::kBF16, Type::kQ8_0, 128, 128, 8, 4, 16, 1, false, 60'000,
     Type::kQ4_0},
    {"bitwise_plain_bf16_q4_0_q8_0_d128_large_hkv4", Type::kBF16, Type::kQ4_0, 128, 128, 8, 4, 16, 1, false, 60'000,
     Type::kQ8_0},
    {"bitwise_bf16_q4_0_q8_0_d128_large_hkv8", Type::kBF16, Type::kQ4_0, 128, 128, 8, 8, 16, 1, true, 60'000,
     Type::kQ8_0},
    {"bitwise_plain_fp16_iq4_nl_d128_large_hkv4", Type::kF16, Type::kIq4Nl, 128, 128, 8, 4, 16, 1, false, 60'000},
    {"bitwise_bf16_q8_0_d128_large_hkv4", Type::kBF16, Type::kQ8_0, 128, 128, 8, 4, 16, 1, true, 60'000},
    {"bitwise_fp16_q4_0_d128_large_hkv4", Type::kF16, Type::kQ4_0, 128, 128, 8, 4, 16, 1, true, 60'000},
    {"bitwise_bf16_q8_0_d128_large_hkv4_g16", Type::kBF16, Type::kQ8_0, 128, 128, 64, 4, 16, 1, true, 60'000},
    {"bitwise_bf16_q8_0_d128_few_or_large_hkv4_g16", Type::kBF16, Type::kQ8_0, 128, 128, 64, 4, 16, 1, true, 20'000},
    {"bitwise_plain_fp16_q4_0_d128_few_or_large_hkv4_g16", Type::kF16, Type::kQ4_0, 128, 128, 64, 4, 16, 1, false,
     20'000},
    {"bitwise_fp16_q4_0_d128_large_hkv4_g12", Type::kF16, Type::kQ4_0, 128, 128, 48, 4, 16, 1, true, 60'000},
    {"bitwise_plain_bf16_iq4_nl_d128_large_hkv4_g16", Type::kBF16, Type::kIq4Nl, 128, 128, 64, 4, 1, 1, false, 60'000},
    {"bitwise_plain_bf16_q8_0_q4_0_d128_large_hkv4_g16", Type::kBF16, Type::kQ8_0, 128, 128, 64, 4, 16, 1, false,
     60'000, Type::kQ4_0},
    {"bitwise_bf16_iq4_nl_q4_0_d128_large_hkv4", Type::kBF16, Type::kIq4Nl, 128, 128, 16, 4, 16, 1, true, 60'000,
     Type::kQ4_0},
    {"bitwise_fp16_q4_1_d128_large_hkv8", Type::kF16, Type::kQ4_1, 128, 128, 32, 8, 16, 1, true, 60'000},
    {"bitwise_bf16_q5_0_d128_large_hkv4", Type::kBF16, Type::kQ5_0, 128, 128, 16, 4, 16, 1, false, 60'000},
    {"bitwise_fp16_q5_1_q5_0_d128_large_hkv4_g16", Type::kF16, Type::kQ5_1, 128, 128, 64, 4, 16, 1, true, 60'000,
     Type::kQ5_0},
    {"bitwise_fp16_iq4_nl_q8_0_d128_large_hkv4_g16", Type::kF16, Type::kIq4Nl, 128, 128, 64, 4, 16, 1, true, 60'000,
     Type::kQ8_0},
    {"bitwise_bf16_q4_0_q8_0_d128_large_hkv4_g16", Type::kBF16, Type::kQ4_0, 128, 128, 64, 4, 16, 1, true, 60'000,
     Type::kQ8_0},
};

// One leaf (64 keys) and less, one group of chunks and several, chunks of one leaf and of many.
std::vector<std::int64_t> lengths() {
  if (options().emulator) return {65, 0, 330, 1, 130};
  return {1023, 0, 64, 1, 1025, 63, 2048, 17000, 65, 5000};
}

// What each request of the pool gives in a call of its own.
RequestPool::Bits each_alone(const RequestPool& pool) {
  RequestPool::Bits alone;
  for (std::size_t id = 0; id < pool.lens().size(); ++id) alone.push_back(pool.run({static_cast<std::int64_t>(id)})[0]);
  return alone;
}

class Bitwise : public testing::TestWithParam<PoolShape> {
 protected:
  void SetUp() override {
    if (!GetParam().lse && !has_plain_kernels()) GTEST_SKIP() << query_target() << " has no kernels of their own";
  }
  void TearDown() override { flashport::set_multiprocessor_limit(options().emulator ? 3 : 0); }
};

TEST_P(Bitwise, AloneInBatchesAndOnAnyNumberOfMultiprocessors) {
  const PoolShape& shape = GetParam();
  FLASHPORT_REQUIRE_SUPPORT(shape.name, flashport::supports(shape.query(shape.q_len)));
  const RequestPool pool(shape, lengths(), 11);
  const auto count = static_cast<std::int64_t>(pool.lens().size());
  const RequestPool::Bits alone = each_alone(pool);

  Random random(12);
  for (int round = 0; round < 3; ++round) {
    std::vector<std::int64_t> batch;
    if (round == 0) batch = random.permutation(count);
    for (std::int64_t i = 0; round > 0 && i < count; ++i) batch.push_back(random.below(count));
    for (int limit : options().emulator ? std::array{1, 2, 3} : std::array{1, 7, 0}) {
      flashport::set_multiprocessor_limit(limit);
      const RequestPool::Bits bits = pool.run(batch, round == 1);
      for (std::size_t b = 0; b < batch.size(); ++b) {
        EXPECT_TRUE(bits[b] == alone[batch[b]]) << "round " << round << ", " << limit << " multiprocessors, index " << b
                                                << ", length " << pool.lens()[batch[b]];
      }
    }
  }
}

// Where chunks begin to have more leaves, and where a group of them is full.
std::vector<std::int64_t> lengths_at_boundaries(std::int64_t kv_heads) {
  const int target = flashport::chunk_target_shift(static_cast<int>(kv_heads));
  std::vector<std::int64_t> boundaries = {64, 4 * 64, 8 * 64};
  for (int longer = 0; longer < (kv_heads > 1 ? 4 : 3); ++longer)
    boundaries.push_back(std::int64_t{64} << (target + longer));
  if (kv_heads > 3) {
    for (const int leaves : {10, 12, 14}) boundaries.push_back(std::int64_t{64} * leaves << target);
  }
  std::vector<std::int64_t> lengths;
  for (const std::int64_t keys : boundaries) lengths.insert(lengths.end(), {keys - 1, keys, keys + 1});
  if (kv_heads == 1) lengths.push_back(131073);  // chunks of 16 leaves were more than there may be
  return lengths;
}

const PoolShape kHeads[] = {
    {"bitwise_boundaries_hkv1", Type::kBF16, Type::kBF16, 64, 64, 8, 1, 16, 1},
    {"bitwise_boundaries_hkv2", Type::kF16, Type::kF16, 64, 64, 2, 2, 16, 1},
    {"bitwise_boundaries_hkv3", Type::kBF16, Type::kBF16, 64, 64, 3, 3, 16, 1},
    {"bitwise_boundaries_hkv8", Type::kBF16, Type::kBF16, 64, 64, 32, 8, 16, 1},
    {"bitwise_boundaries_hkv32", Type::kF16, Type::kF16, 64, 64, 32, 32, 1, 1},
    {"bitwise_boundaries_hkv4_q4", Type::kBF16, Type::kBF16, 64, 64, 16, 4, 16, 4},
    {"bitwise_boundaries_large_hkv8", Type::kBF16, Type::kBF16, 64, 64, 32, 8, 16, 1, false, 150'000},
    {"bitwise_boundaries_q8_0_large_hkv4", Type::kBF16, Type::kQ8_0, 128, 128, 8, 4, 16, 1, false, 60'000},
};

class FullBitwiseBoundaries : public Bitwise {};

TEST_P(FullBitwiseBoundaries, AloneAndInRaggedBatches) {
  const PoolShape& shape = GetParam();
  FLASHPORT_REQUIRE_SUPPORT(shape.name, flashport::supports(shape.query(shape.q_len)));
  const RequestPool pool(shape, lengths_at_boundaries(shape.hkv), 17);
  const auto count = static_cast<std::int64_t>(pool.lens().size());
  const RequestPool::Bits alone = each_alone(pool);
  Random random(18);
  for (int limit : {1, 2, 3, 7, 16, 132, 528, 0}) {
    flashport::set_multiprocessor_limit(limit);
    const std::vector<std::int64_t> batch = random.permutation(count);
    const RequestPool::Bits bits = pool.run(batch, limit % 2 == 1);
    for (std::size_t b = 0; b < batch.size(); ++b) {
      EXPECT_TRUE(bits[b] == alone[batch[b]])
          << limit << " multiprocessors, index " << b << ", length " << pool.lens()[batch[b]];
    }
  }
}

// The same tensors and the same workspace, call after call, while lengths grow and shrink over the boundaries.
TEST_P(FullBitwiseBoundaries, CallsWithOtherLengths) {
  const PoolShape& shape = GetParam();
  FLASHPORT_REQUIRE_SUPPORT(shape.name, flashport::supports(shape.query(shape.q_len)));
  const std::vector<std::int64_t> lens = lengths_at_boundaries(shape.hkv);
  const std::int64_t longest = lens[lens.size() - 2];
  constexpr std::int64_t kRequests = 3;
  const RequestPool pool(shape, std::vector<std::int64_t>(kRequests, longest), 19);
  RequestPool::Call together(pool, {0, 1, 2}, false);
  std::map<std::pair<std::int64_t, std::int64_t>, std::vector<unsigned char>> alone;  // of (request, length)
  const auto run = [](RequestPool::Call& call, const std::vector<std::int64_t>& with) {
    call.set_lengths(with);
    call.poison_outputs();
    flashport::flash_decode(call.args());
    return call.fetch();
  };
  Random random(20);
  for (int replay = 0; replay < 12; ++replay) {
    std::vector<std::int64_t> with(kRequests);
    for (std::int64_t& len : with) {
      do len = lens[random.below(static_cast<std::int64_t>(lens.size()))];
      while (len > longest);
    }
    const RequestPool::Bits bits = run(together, with);
    for (std::int64_t id = 0; id < kRequests; ++id) {
      auto& expected = alone[{id, with[id]}];
      if (expected.empty()) {
        RequestPool::Call one(pool, {id}, false);
        expected = run(one, {with[id]})[0];
      }
      ASSERT_TRUE(bits[id] == expected) << "call " << replay << ", length " << with[id];
    }
  }
}

// Many cuts of long lines of leaves: every grid from one block to more blocks than leaves.
void check_under_random_schedules(const PoolShape& shape) {
  const RequestPool pool(shape, {17000, 1, 1024, 1025, 0, 16384, 16385, 4096, 70, 2000}, 15);
  const auto count = static_cast<std::int64_t>(pool.lens().size());
  const RequestPool::Bits alone = each_alone(pool);
  Random random(16);
  for (int round = 0; round < 100; ++round) {
    std::vector<std::int64_t> batch(1 + random.below(2 * count));
    for (std::int64_t& id : batch) id = random.below(count);
    const auto limit = static_cast<int>(1 + random.below(1 + random.below(400)));
    flashport::set_multiprocessor_limit(limit);
    const RequestPool::Bits bits = pool.run(batch);
    for (std::size_t b = 0; b < batch.size(); ++b) {
      ASSERT_TRUE(bits[b] == alone[batch[b]]) << "round " << round << ", " << limit << " multiprocessors, index " << b
                                              << ", length " << pool.lens()[batch[b]];
    }
  }
  flashport::set_multiprocessor_limit(0);
}

TEST(FullBitwise, UnderRandomSchedules) {
  check_under_random_schedules({"bitwise_schedules", Type::kF16, Type::kF16, 64, 64, 1, 1, 16, 1});
}

// States of more pieces than a block has threads to combine them.
TEST(FullBitwise, UnderRandomSchedulesOfManyRows) {
  const PoolShape shape{"bitwise_schedules_g16", Type::kF16, Type::kE4M3, 64, 64, 16, 1, 16, 1};
  FLASHPORT_REQUIRE_SUPPORT(shape.name, flashport::supports(shape.query(1)));
  check_under_random_schedules(shape);
}

TEST_P(Bitwise, OnRepeat) {
  const PoolShape& shape = GetParam();
  FLASHPORT_REQUIRE_SUPPORT(shape.name, flashport::supports(shape.query(shape.q_len)));
  const RequestPool pool(shape, lengths(), 13);
  std::vector<std::int64_t> all(pool.lens().size());
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::int64_t>(i);
  const RequestPool::Bits first = pool.run(all);
  for (int repeat = 0; repeat < (options().emulator ? 2 : 20); ++repeat) EXPECT_TRUE(pool.run(all) == first) << repeat;
}

// For shapes with several tokens.
class BitwiseTiles : public Bitwise {};

TEST_P(BitwiseTiles, QueryTokensThatShareATile) {
  const PoolShape& shape = GetParam();
  FLASHPORT_REQUIRE_SUPPORT(shape.name, flashport::supports(shape.query(shape.q_len)));
  // Tiles of other rows may add in another order; the same kernel may not.
  const std::string alone = flashport::which_kernel(shape.query(1));
  const std::string shared = flashport::which_kernel(shape.query(shape.q_len));
  const flashport::Support same{alone == shared, "one token takes " + alone + ", several take " + shared};
  FLASHPORT_REQUIRE_SUPPORT("tile_" + shape.name, same);
  const RequestPool pool(shape, lengths(), 14);
  const std::int64_t out_row = shape.hq * shape.dv * reference::type_bytes(shape.q), lse_row = shape.hq * 4;
  for (std::int64_t id = 0; id < static_cast<std::int64_t>(pool.lens().size()); ++id) {
    if (pool.lens()[id] < shape.q_len) continue;
    const std::vector<unsigned char> together = pool.run({id})[0];
    for (std::int64_t token = 0; token < shape.q_len; ++token) {
      std::vector<unsigned char> row(together.begin() + token * out_row, together.begin() + (token + 1) * out_row);
      const auto lse = together.begin() + shape.q_len * out_row + token * lse_row;
      row.insert(row.end(), lse, lse + lse_row);
      EXPECT_TRUE(pool.run_token(id, token) == row) << "length " << pool.lens()[id] << ", token " << token;
    }
  }
}

std::vector<PoolShape> shapes_of_several_tokens() {
  std::vector<PoolShape> shapes;
  std::ranges::copy_if(kShapes, std::back_inserter(shapes),
                       [](const PoolShape& shape) { return shape.q_len > 1 && shape.lse; });
  return shapes;
}

const auto name_of = [](const auto& info) { return info.param.name; };
INSTANTIATE_TEST_SUITE_P(Shapes, Bitwise, testing::ValuesIn(kShapes), name_of);
INSTANTIATE_TEST_SUITE_P(Full, FullBitwiseBoundaries, testing::ValuesIn(kHeads), name_of);
INSTANTIATE_TEST_SUITE_P(Shapes, BitwiseTiles, testing::ValuesIn(shapes_of_several_tokens()), name_of);

}  // namespace
}  // namespace flashport_test
