// Sequences whose chunks have 10, 12 or 14 leaves, against the oracle, and with equal bits on few multiprocessors and
// on all. Many kv heads have such chunks from short lengths on.
#include <gtest/gtest.h>

#include <flashport/backend.h>
#include <flashport/decode.h>

#include <set>
#include <string>
#include <vector>

#include "common/device/decode/chunks.h"
#include "tests/ops/decode/call.h"
#include "tests/support/device.h"
#include "tests/support/expected_support.h"

namespace flashport_test {
namespace {

using reference::Type;

struct ChunkCase {
  std::string name;
  Type q, k, v;
  std::int64_t dim, group, kv_heads;
  std::vector<std::int64_t> lens;
  std::set<int> sizes;  // leaves of the chunks of all sequences, on targets without finer chunks
  std::int64_t q_len = 1;
};
std::ostream& operator<<(std::ostream& out, const ChunkCase& c) { return out << c.name; }

DecodeCase decode_case(const ChunkCase& from) {
  DecodeCase c{};
  c.name = "chunk_sizes_" + from.name;
  c.tier = "emulator";
  c.q = from.q;
  c.k_format = from.k;
  c.v_format = from.v;
  c.dk = c.dv = from.dim;
  c.hq = from.group * from.kv_heads;
  c.hkv = from.kv_heads;
  c.q_len = from.q_len;
  c.q_form = from.q_len == 1 ? "token" : "uniform";
  c.layout = "block_nhd";
  c.page = 16;
  c.lens = from.lens;
  c.window_left = -1;
  c.window_right = from.q_len == 1 ? -1 : 0;
  c.alibi = c.scales = "none";
  c.lse = true;
  c.strides = "dense";
  c.splits = flashport::kInvariantSplits;
  return c;
}

// Two of them long, in the shares of different lanes.
std::vector<std::int64_t> more_sequences_than_lanes() {
  std::vector<std::int64_t> lens(67, 1);
  lens[3] = 5200;
  lens[65] = 4097;
  return lens;
}

// A tile has up to eight chunks with 9 kv heads, four with 17, and two with 33.
std::vector<ChunkCase> cases() {
  constexpr Type kF16 = Type::kF16, kBF16 = Type::kBF16;
  return {
      {"9_heads", kBF16, kBF16, kBF16, 64, 1, 9, {4097, 5200, 6300}, {10, 12, 14}},
      {"17_heads", kBF16, kBF16, kBF16, 64, 1, 17, {2561}, {12}},
      {"33_heads", kBF16, kBF16, kBF16, 64, 1, 33, {1025, 1, 1281}, {1, 10, 12}},
      {"67_sequences", kBF16, kBF16, kBF16, 64, 1, 9, more_sequences_than_lanes(), {1, 10, 12}},
      {"drafts", kF16, kF16, kF16, 64, 4, 33, {1281}, {12}, 8},
      {"groups_of_17", kBF16, kBF16, kBF16, 128, 17, 33, {1025}, {10}},
      {"fp8", kF16, Type::kE4M3, Type::kE4M3, 64, 1, 9, {6300}, {14}},
      {"q8_0", kBF16, Type::kQ8_0, Type::kQ8_0, 128, 2, 17, {2561}, {12}},
      {"q8_0_q4_0", kBF16, Type::kQ8_0, Type::kQ4_0, 128, 1, 33, {1537}, {14}},
      {"wide", kBF16, kBF16, kBF16, 256, 1, 33, {1025}, {10}},
  };
}

class ChunkSizes : public testing::TestWithParam<ChunkCase> {
 protected:
  void TearDown() override { flashport::set_multiprocessor_limit(options().emulator ? 3 : 0); }
};

TEST_P(ChunkSizes, MatchTheOracle) {
  const ChunkCase& from = GetParam();
  std::set<int> sizes;
  for (const std::int64_t keys : from.lens) {
    const int target = flashport::chunk_target_shift(static_cast<int>(from.kv_heads));
    sizes.insert(flashport::chunk_size(static_cast<int>(flashport::leaves_of(keys)), {target, 0, false}).leaves);
  }
  EXPECT_EQ(sizes, from.sizes);
  const DecodeCase c = decode_case(from);
  FLASHPORT_REQUIRE_SUPPORT(c.name, flashport::supports(c.query()));
  DecodeCall call(c);
  call.upload();
  call.run();
  EXPECT_EQ(call.check(math_of_key(flashport::which_kernel(c.query()))), "");
  const auto bits = call.bits();
  flashport::set_multiprocessor_limit(options().emulator ? 0 : 5);
  call.run();
  EXPECT_TRUE(call.bits() == bits);
}

INSTANTIATE_TEST_SUITE_P(Emulator, ChunkSizes, testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace flashport_test
