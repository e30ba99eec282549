// A few queries that see the keys after them, on a cache, which flash_decode's kernels serve: against the oracle at the
// edges of windows, leaves and turns, and against causal calls where a window hides all later keys.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "tests/ops/attention/call.h"
#include "tests/ops/decode/call.h"
#include "tests/support/expected_support.h"

namespace flashport_test {
namespace {

using reference::Type;

AttentionCase on_a_cache(std::string name, std::int64_t queries, std::int64_t dim = 64) {
  return {.name = std::move(name),
          .dim_qk = dim,
          .dim_v = dim,
          .q_lens = {queries, queries, queries, queries},
          .kv_lens = {130, 0, 1, 64},
          .used_k = true,
          .lse = queries % 2 == 0};
}

std::vector<AttentionCase> cases() {
  std::vector<AttentionCase> cases;
  for (const std::int64_t queries : {2, 3, 4, 8, 16}) {
    cases.push_back(on_a_cache("of_" + std::to_string(queries), queries));
  }
  // The last keys that a row sees lie on both sides of the ends of leaves and turns.
  for (const std::int64_t right : {0, 1, 2, 5, 6, 7}) {
    AttentionCase c = on_a_cache("window_right_" + std::to_string(right), 7);
    c.kv_lens = {70 - right, 64, 129, 515};
    c.window_right = right;
    cases.push_back(c);
  }
  AttentionCase both = on_a_cache("window", 6);
  both.kv_lens = {200, 67, 5, 131};
  both.window_left = 60;
  both.window_right = 2;
  cases.push_back(both);
  both.name = "window_left";
  both.window_right = -1;
  cases.push_back(both);

  AttentionCase options = on_a_cache("softcap_slopes_sinks", 5, 128);
  options.softcap = 8;
  options.slopes = Slopes::kOfSequences;
  options.sinks = true;
  cases.push_back(options);
  for (const Pages pages : {Pages::kBlockTable, Pages::kBlockTableHnd, Pages::kTokenTable, Pages::kCsr}) {
    AttentionCase c = on_a_cache("pages_" + std::to_string(static_cast<int>(pages)), 4, 128);
    c.pages = pages;
    c.used_k = false;
    c.type = Type::kF16;
    cases.push_back(c);
  }
  for (const Type stored : {Type::kE4M3, Type::kQ8_0, Type::kQ4_0, Type::kI8, Type::kQ5_1}) {
    AttentionCase c = on_a_cache(std::string("on_") + type_name(stored), 4, 128);
    c.kv_type = stored;
    cases.push_back(c);
  }
  AttentionCase chunks = on_a_cache("chunks", 4, 128);
  chunks.kv_lens = {1500, 2100, 3, 700};
  cases.push_back(chunks);
  return cases;
}

flashport::AttentionQuery query_of(const AttentionCase& c) {
  flashport::AttentionQuery query = c.query();
  query.q_len = c.q_lens[0];
  query.group_size = c.q_heads / c.kv_heads;
  query.seqused_k = true;
  return query;
}

class FewQueries : public testing::TestWithParam<AttentionCase> {};

TEST_P(FewQueries, SeeLaterKeys) {
  const AttentionCase& c = GetParam();
  FLASHPORT_REQUIRE_SUPPORT(c.support_name(), flashport::supports(query_of(c)));
  const std::string kernel = flashport::which_kernel(query_of(c));
  EXPECT_TRUE(kernel.starts_with("decode/")) << kernel;
  AttentionCall call(c);
  call.run();
  EXPECT_EQ(call.check(math_of_key(kernel)), "") << kernel << ", " << c;
}

INSTANTIATE_TEST_SUITE_P(OnACache, FewQueries, testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

TEST(FewQueriesInAWindow, ThatEndsAtThemHaveTheBitsOfCausalOnes) {
  AttentionCase c = on_a_cache("causal_by_window", 5, 128);
  FLASHPORT_REQUIRE_SUPPORT(c.support_name(), flashport::supports(query_of(c)));
  c.kv_lens = {300, 64, 2, 1100};
  c.window_right = 0;
  AttentionCall windowed(c);
  windowed.run();
  c.window_right = -1;
  AttentionCall all(c);
  all.run();
  c.causal = true;
  AttentionCall causal(c);
  causal.run();
  EXPECT_EQ(windowed.bits(), causal.bits());
  EXPECT_NE(all.bits(), causal.bits());
}

TEST(FewQueriesThatSeeAllKeys, HaveTheBitsOfThoseAlone) {
  const AttentionCase all = on_a_cache("in_a_batch", 3, 128);
  FLASHPORT_REQUIRE_SUPPORT(all.support_name(), flashport::supports(query_of(all)));
  AttentionCall batch(all);
  batch.run();
  for (std::size_t i = 0; i < all.kv_lens.size(); ++i) {
    AttentionCase c = all;
    c.ids = {static_cast<std::int64_t>(i)};
    c.q_lens = {all.q_lens[i]};
    c.kv_lens = {all.kv_lens[i]};
    AttentionCall one(c);
    one.run();
    EXPECT_EQ(one.bits(0), batch.bits(static_cast<std::int64_t>(i))) << i;
  }
}

}  // namespace
}  // namespace flashport_test
