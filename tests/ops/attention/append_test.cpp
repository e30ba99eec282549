// Attention that writes new keys first: the cache's bits are those that the reference's encoding gives, everything else
// in it keeps its bits, and the outputs have the bits of a call without new keys on such a cache, which other tests
// hold against the oracle. Rotary position embedding is computed here in fp32 as the library does, and held against
// fp64.
#include <gtest/gtest.h>

#include <flashport/attention.h>
#include <flashport/backend.h>
#include <flashport/error.h>

#include <iterator>
#include <set>
#include <string>

#include "tests/ops/attention/append_call.h"
#include "tests/support/expected_support.h"
#include "tests/support/graphs.h"
#include "tests/support/message_of.h"

namespace flashport_test {
namespace {

using reference::Type;

class AttentionAppends : public testing::TestWithParam<AppendCase> {
 protected:
  void TearDown() override { flashport::set_multiprocessor_limit(options().emulator ? 3 : 0); }
};

void expect_two_calls(const AppendCase& c) {
  AppendCall call(c);
  call.upload();
  flashport::attention(call.appending_args());
  const std::vector<unsigned char> got = call.fetch();
  call.make_wanted();
  EXPECT_EQ(call.check_caches(), "");
  EXPECT_EQ(call.out().damage(), "");
  call.upload();
  flashport::attention(call.args());
  EXPECT_TRUE(got == call.fetch());
}

TEST_P(AttentionAppends, LeaveTheCacheAndGiveTheBitsOfTwoCalls) {
  const AppendCase& c = GetParam();
  FLASHPORT_REQUIRE_SUPPORT("attention_append_" + c.name, flashport::supports(c.query()));
  expect_two_calls(c);
  if (!c.one_launch) return;
  const bool is_one = flashport::which_kernel(c.query()).starts_with("decode_append/");
  const bool fits =
      c.dim_qk > 64 || c.queries[0] * c.q_heads / c.kv_heads <= 8;  // at 64 there are tiles of 8 rows alone
  EXPECT_EQ(is_one, query_target().starts_with("sm90") && fits);
  if (!is_one) return;
  // Blocks with several tiles, or parts of them.
  flashport::set_multiprocessor_limit(2);
  expect_two_calls(c);
}

// Calls that decode's kernels serve, whose new keys end one leaf, chunk or page and begin the next.
std::vector<AppendCase> one_launch_cases() {
  std::vector<AppendCase> cases;
  const auto add = [&](AppendCase c) {
    c.one_launch = true;
    for (const std::int64_t dim : {64, 128}) {
      for (const Rotary rotary : {Rotary::kNone, Rotary::kHalves, Rotary::kInterleaved}) {
        for (const bool lse : {true, false}) {
          AppendCase its = c;
          const char* names[] = {"plain", "halves", "interleaved"};
          its.name = "one_launch_" + c.name + "_d" + std::to_string(dim) + "_" + names[static_cast<int>(rotary)] +
                     (lse ? "" : "_without_lse");
          its.dim_qk = its.dim_v = dim;
          its.rotary = rotary;
          its.lse = lse;
          if (c.rotary_dim == 64) its.rotary_dim = dim;
          cases.push_back(its);
        }
      }
    }
  };
  add({.name = "token",
       .before = {0, 15, 63, 64, 127},
       .added = {1, 1, 1, 1, 1},
       .queries = {1, 1, 1, 1, 1},
       .q_heads = 8,
       .room = 128});
  add({.name = "token_fp16",
       .type = Type::kF16,
       .before = {5, 63, 127},
       .added = {1, 1, 1},
       .queries = {1, 1, 1},
       .room = 136});
  add({.name = "heads",
       .before = {61, 128, 3},
       .added = {2, 2, 2},
       .queries = {2, 2, 2},
       .pages = Pages::kBlockTable,
       .q_heads = 16,
       .room = 136});
  add({.name = "leaves",
       .before = {61, 62, 63, 127, 0},
       .added = {3, 3, 3, 3, 3},
       .queries = {3, 3, 3, 3, 3},
       .pages = Pages::kBlockTable,
       .room = 136});
  add({.name = "chunks",
       .type = Type::kF16,
       .before = {1022, 1, 2046, 766},
       .added = {4, 4, 4, 4},
       .queries = {2, 2, 2, 2},
       .pages = Pages::kBlockTableHnd,
       .q_heads = 16,
       .angles = Type::kF32,
       .room = 2056});
  add({.name = "counts",
       .before = {0, 60, 130, 40, 5},
       .added = {0, 2, 1, 9, 0},
       .packed_new = true,
       .queries = {2, 2, 2, 2, 2},
       .pages = Pages::kCsr,
       .rotary_dim = 48,
       .room = 136});
  add({.name = "one_long",
       .before = {3, 50, 64, 9},
       .added = {1, 47, 0, 3},
       .packed_new = true,
       .queries = {1, 1, 1, 1},
       .pages = Pages::kTokenTable,
       .angles = Type::kF32,
       .room = 136});
  add({.name = "not_causal",
       .before = {3, 126},
       .added = {7, 7},
       .queries = {1, 1},
       .positions = 130,
       .causal = false,
       .room = 136});
  add({.name = "queries_not_causal",
       .before = {3, 126, 62},
       .added = {4, 4, 4},
       .queries = {2, 2, 2},
       .positions = 130,
       .causal = false,
       .room = 136});
  add({.name = "window", .before = {30, 126}, .added = {5, 5}, .queries = {2, 2}, .room = 136, .window_left = 3});
  return cases;
}

// Without an lse, the kernels for plain calls.
TEST(AppendInstances, CasesReachEveryKernel) {
  std::set<std::string> reached;
  for (const AppendCase& c : one_launch_cases()) {
    const flashport::AttentionScheduleQuery query{.call = c.query(),
                                                  .batch = static_cast<std::int64_t>(c.before.size()),
                                                  .num_q_heads = c.q_heads,
                                                  .num_kv_heads = c.kv_heads,
                                                  .q_len = c.queries[0],
                                                  .kv_len = c.room,
                                                  .window_left = c.window_left};
    if (!flashport::supports(query.call).supported) continue;
    reached.insert(c.lse ? flashport::which_kernel(query.call) : flashport::explain(query).kernel);
  }
  for (const std::string& key : flashport::kernel_keys(query_target())) {
    if (key.starts_with("decode_append/")) {
      EXPECT_TRUE(reached.contains(key)) << "no case runs " << key;
    }
  }
}

std::vector<AppendCase> append_cases() {
  std::vector<AppendCase> cases;
  for (const auto& [name, rotary] :
       {std::pair{"plain", Rotary::kNone}, {"halves", Rotary::kHalves}, {"interleaved", Rotary::kInterleaved}}) {
    const std::string text = name;
    cases.push_back({.name = text, .rotary = rotary});
    cases.push_back({.name = text + "_fp16_d128_part",
                     .type = Type::kF16,
                     .dim_qk = 128,
                     .dim_v = 128,
                     .rotary = rotary,
                     .rotary_dim = 48,
                     .angles = Type::kF32});
    cases.push_back({.name = text + "_pages", .pages = Pages::kBlockTable, .rotary = rotary});
    cases.push_back({.name = text + "_many_queries",
                     .added = {20, 20, 20, 20},
                     .queries = {20, 20, 20, 20},
                     .pages = Pages::kBlockTable,
                     .rotary = rotary});
    cases.push_back({.name = text + "_packed",
                     .added = {0, 9, 1, 24},
                     .packed_new = true,
                     .queries = {1, 0, 30, 2},
                     .packed_q = true,
                     .pages = Pages::kBlockTable,
                     .rotary = rotary});
    cases.push_back({.name = text + "_loose", .rotary = rotary, .loose = true});
  }
  // So many rows that waves have one each, and more heads than threads have side by side.
  for (const bool packed : {false, true}) {
    cases.push_back({.name = packed ? "many_heads_packed" : "many_heads",
                     .added = {70, 70, 70, 70},
                     .packed_new = packed,
                     .queries = {70, 70, 70, 70},
                     .packed_q = packed,
                     .pages = Pages::kBlockTable,
                     .dim_qk = 128,
                     .dim_v = 128,
                     .q_heads = 20,
                     .kv_heads = 10,
                     .rotary_dim = 128,
                     .room = 128});
  }
  cases.push_back({.name = "one_token", .added = {1, 1, 1, 1}, .queries = {1, 1, 1, 1}, .q_heads = 8});
  cases.push_back({.name = "hnd_pages", .pages = Pages::kBlockTableHnd});
  cases.push_back({.name = "token_table", .pages = Pages::kTokenTable});
  cases.push_back({.name = "csr", .pages = Pages::kCsr, .rotary = Rotary::kInterleaved});
  cases.push_back({.name = "few_positions", .positions = 17});
  cases.push_back({.name = "not_causal", .added = {5, 5, 5, 5}, .causal = false});
  cases.push_back({.name = "more_keys_than_queries", .added = {9, 9, 9, 9}, .queries = {2, 2, 2, 2}});
  cases.push_back(
      {.name = "fewer_keys_than_queries", .before = {6, 15, 16, 40}, .added = {1, 1, 1, 1}, .queries = {7, 7, 7, 7}});
  cases.push_back({.name = "other_value_dim", .dim_qk = 192, .dim_v = 128, .rotary_dim = 192});
  cases.push_back({.name = "few_of_e4m3", .cache_type = Type::kE4M3, .scales = true});
  cases.push_back({.name = "fp8_many_queries",
                   .type = Type::kF16,
                   .cache_type = Type::kE4M3,
                   .added = {20, 20, 20, 20},
                   .queries = {20, 20, 20, 20},
                   .scales = true});
  cases.push_back({.name = "q8_0", .cache_type = Type::kQ8_0, .pages = Pages::kBlockTable});
  for (const Type blocks : {Type::kQ4_0, Type::kQ4_1, Type::kQ5_0, Type::kQ5_1, Type::kIq4Nl}) {
    cases.push_back(
        {.name = std::string("blocks_") + type_name(blocks), .cache_type = blocks, .pages = Pages::kBlockTable});
  }
  for (const Type numbers : {Type::kI8, Type::kE5M2}) {
    for (const std::int64_t queries : {3, 20}) {
      cases.push_back({.name = std::string("numbers_") + type_name(numbers) + "_" + std::to_string(queries),
                       .cache_type = numbers,
                       .added = {queries, queries, queries, queries},
                       .queries = {queries, queries, queries, queries},
                       .scales = true});
    }
  }
  cases.push_back({.name = "fp32", .type = Type::kF32, .angles = Type::kF32});
  // Two launches: a window that leaves new keys out, many query rows, and rows of 72 values of which 64 are turned.
  cases.push_back({.name = "window_after_new_keys", .added = {9, 9, 9, 9}, .queries = {2, 2, 2, 2}, .window_left = 3});
  cases.push_back({.name = "many_rows",
                   .before = {0, 63, 250},
                   .added = {16, 16, 16},
                   .queries = {16, 16, 16},
                   .pages = Pages::kBlockTable,
                   .dim_qk = 128,
                   .dim_v = 128,
                   .q_heads = 16,
                   .room = 272});
  cases.push_back({.name = "odd_units", .dim_qk = 72, .dim_v = 72, .one_launch = true});
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Named, AttentionAppends, testing::ValuesIn(append_cases()),
                         [](const auto& info) { return info.param.name; });
INSTANTIATE_TEST_SUITE_P(OneLaunch, AttentionAppends, testing::ValuesIn(one_launch_cases()),
                         [](const auto& info) { return info.param.name; });

// Keys for which there is no room are refused where lengths are in host memory, and dropped where they are not.
TEST(AttentionAppendRoom, IsNeverExceeded) {
  const AppendCase c{.name = "room", .before = {62}, .added = {3}, .queries = {3}};
  FLASHPORT_REQUIRE_SUPPORT("attention_append_room", flashport::supports(c.query()));
  AppendCall call(c);
  call.upload();
  if (device().kind == flashport::DeviceKind::kCpu) {
    EXPECT_EQ(message_of<flashport::ValueError>([&] { flashport::attention(call.appending_args()); }),
              "attention: seqused_k[0] = 62 and 3 new keys must lie in [0, 64] (what the cache can hold)");
    EXPECT_EQ(call.check_caches(), "");
    return;
  }
  flashport::attention(call.appending_args());
  call.k_cache().download();
  EXPECT_EQ(call.k_cache().damage(), "");
  for (const std::int64_t token : {62, 63}) EXPECT_FALSE(std::isnan(call.k_cache().get({0, token, 1, 5})));
}

// Where nothing is checked, wrong tables and offsets write nothing outside of the cache.
TEST(AttentionAppendRoom, WrongIndicesWriteNothing) {
  if (device().kind == flashport::DeviceKind::kCpu) GTEST_SKIP() << "a CPU refuses them";
  const AppendCase c{.name = "wrong",
                     .before = {5, 6},
                     .added = {3, 3},
                     .packed_new = true,
                     .queries = {3, 3},
                     .packed_q = true,
                     .pages = Pages::kBlockTable};
  FLASHPORT_REQUIRE_SUPPORT("attention_append_wrong", flashport::supports(c.query()));
  for (const double page : {-1.0, 24.0}) {  // attention reads there: pages beside the cache, whose memory there is
    AppendCall call(c);
    call.block_table().for_each([&](const Shape& at) {
      if (at[1] == 1) call.block_table().set(at, page);
    });
    call.cu_seqlens_new().set({0}, page == 24 ? -2147483648.0 : 0);
    call.upload();
    flashport::attention(call.appending_args());
    call.k_cache().download();
    EXPECT_EQ(call.k_cache().damage(), "");
  }
}

// A kernel that decodes and appends does not even read the page of a new key.
TEST(AttentionAppendRoom, OneLaunchWritesNothingToWrongPages) {
  const AppendCase c{
      .name = "wrong_page", .before = {6, 7}, .added = {3, 3}, .queries = {3, 3}, .pages = Pages::kBlockTable};
  FLASHPORT_REQUIRE_SUPPORT("attention_append_wrong_page", flashport::supports(c.query()));
  if (!flashport::which_kernel(c.query()).starts_with("decode_append/")) GTEST_SKIP() << "two launches";
  AppendCall right(c);
  right.upload();
  flashport::attention(right.appending_args());
  const std::vector<unsigned char> wanted = right.fetch();
  for (const double page : {-1.0, 24.0, 1e9}) {
    AppendCall call(c);
    for (const std::int64_t b : {0, 1}) call.block_table().set({b, 1}, page);
    call.upload();
    flashport::attention(call.appending_args());
    EXPECT_TRUE(call.fetch() == wanted);
    call.k_cache().download();
    EXPECT_EQ(call.k_cache().damage(), "");
  }
}

TEST(AttentionAppendRepeats, GraphsAreReplayedWithOtherLengths) {
  if (!has_graphs()) GTEST_SKIP() << "a CPU has no graphs";
  const AppendCase c{.name = "graph",
                     .before = {3, 64, 120},
                     .added = {2, 2, 2},
                     .queries = {2, 2, 2},
                     .pages = Pages::kBlockTable,
                     .dim_qk = 128,
                     .dim_v = 128,
                     .rotary_dim = 128,
                     .room = 136};
  FLASHPORT_REQUIRE_SUPPORT("attention_append_graph", flashport::supports(c.query()));
  AppendCall call(c), eager(c);
  call.upload();
  eager.upload();
  const DeviceStream stream;
  flashport::attention(eager.appending_args(), stream.handle());  // prepares the workspace of the capture
  stream.synchronize();
  const flashport::AttentionArgs args = call.appending_args();
  const DeviceGraph graph(stream, [&] { flashport::attention(args, stream.handle()); });
  for (const std::vector<std::int64_t>& before : {c.before, {2, 63, 119}, {0, 10, 62}}) {
    for (AppendCall* each : {&call, &eager}) {
      for (std::size_t b = 0; b < before.size(); ++b) {
        each->seqlens().set({static_cast<std::int64_t>(b)}, static_cast<double>(before[b]));
      }
      each->upload();
    }
    flashport::attention(eager.appending_args());
    graph.launch(stream);
    stream.synchronize();
    EXPECT_TRUE(call.fetch() == eager.fetch());
    for (AppendCall* each : {&call, &eager}) each->k_cache().download();
    EXPECT_TRUE(call.k_cache().element_bytes() == eager.k_cache().element_bytes());
  }
}

// A captured or repeated call goes on from whatever lengths are there.
TEST(AttentionAppendRepeats, ContinueFromTheLengths) {
  const AppendCase c{.name = "steps", .before = {3}, .added = {1}, .queries = {1}, .q_heads = 8};
  FLASHPORT_REQUIRE_SUPPORT("attention_append_steps", flashport::supports(c.query()));
  AppendCall call(c);
  call.upload();
  for (std::int64_t length = 3; length < 8; ++length) {
    call.seqlens().set({0}, static_cast<double>(length));
    call.seqlens().upload();
    flashport::attention(call.appending_args());
    call.k_cache().download();
    EXPECT_FALSE(std::isnan(call.k_cache().get({0, length, 0, 0})));
    EXPECT_TRUE(std::isnan(call.k_cache().get({0, length + 1, 0, 0})));
  }
}

}  // namespace
}  // namespace flashport_test
