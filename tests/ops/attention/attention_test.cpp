// attention against the oracle: named shapes and options, and random combinations of options; that the cases reach
// every kernel of the target.
#include <gtest/gtest.h>

#include <flashport/backend.h>

#include <algorithm>
#include <set>

#include "tests/ops/attention/combinations.h"
#include "tests/support/expected_support.h"

namespace flashport_test {
namespace {

using reference::Type;

std::vector<AttentionCase> named_cases() {
  std::vector<AttentionCase> cases = {
      {.name = "plain"},
      {.name = "causal", .causal = true},
      {.name = "fp16", .type = Type::kF16},
      {.name = "fp16_any", .type = Type::kF16, .causal = true, .softcap = 5},
      {.name = "fp32", .type = Type::kF32, .causal = true},
      {.name = "one_query", .q_lens = {1, 1}, .causal = true},
      {.name = "one_key", .kv_lens = {1, 1}, .causal = true},
      {.name = "more_queries_than_keys", .q_lens = {203, 203}, .kv_lens = {113, 113}, .causal = true},
      {.name = "no_keys", .kv_lens = {0, 0}, .sinks = true},
      {.name = "no_keys_no_sinks", .kv_lens = {0, 0}},
      {.name = "packed", .q_lens = {5, 0, 130, 1}, .kv_lens = {70, 3, 130, 0}, .packed = true, .causal = true},
      {.name = "packed_used",
       .q_lens = {5, 0, 130, 1},
       .kv_lens = {70, 3, 130, 0},
       .packed = true,
       .used_q = true,
       .used_k = true,
       .leftpad = true,
       .causal = true},
      {.name = "dense_used", .q_lens = {5, 130}, .kv_lens = {70, 203}, .used_q = true, .used_k = true, .leftpad = true},
      {.name = "window_at_tile_edges", .kv_lens = {257, 257}, .window_left = 64, .window_right = 63},
      {.name = "window_of_one", .window_left = 0, .window_right = 0},
      {.name = "window_right_of_the_keys",
       .q_lens = {257, 257},
       .kv_lens = {64, 64},
       .window_left = 3,
       .window_right = 3},
      {.name = "windowed_prompt", .q_lens = {300, 300}, .kv_lens = {300, 300}, .causal = true, .window_left = 63},
      {.name = "projection",
       .q_lens = {113, 113},
       .kv_lens = {113, 113},
       .causal = true,
       .layout = Layout::kProjection},
      {.name = "odd_rows", .causal = true, .layout = Layout::kOdd},
      {.name = "odd_queries",
       .q_lens = {130, 5, 200, 77},
       .kv_lens = {203, 70, 200, 131},
       .packed = true,
       .causal = true,
       .layout = Layout::kOddQueries},
      {.name = "all_heads_of_one", .q_heads = 8, .kv_heads = 1, .causal = true},
      {.name = "heads_of_their_own", .q_heads = 3, .kv_heads = 3, .causal = true},
      {.name = "everything",
       .q_lens = {5, 0, 130},
       .kv_lens = {70, 3, 257},
       .packed = true,
       .used_q = true,
       .used_k = true,
       .leftpad = true,
       .causal = true,
       .window_left = 100,
       .softcap = 10,
       .slopes = Slopes::kOfSequences,
       .sinks = true,
       .dropout = 0.3,
       .layout = Layout::kGaps},
      {.name = "bias_and_all_that_goes_with_it",
       .causal = true,
       .window_left = 70,
       .softcap = 10,
       .slopes = Slopes::kOfHeads,
       .sinks = true,
       .bias = Bias::kOwnType,
       .dropout = 0.3,
       .layout = Layout::kOdd},
  };
  for (const std::int64_t dim : {16, 24, 40, 64, 72, 80, 96, 104, 128, 136, 192, 256, 320, 512}) {
    for (const bool any : {false, true}) {
      cases.push_back({.name = (any ? "any_d" : "d") + std::to_string(dim),
                       .type = dim % 16 == 0 ? Type::kBF16 : Type::kF16,
                       .dim_qk = dim,
                       .dim_v = dim,
                       .q_heads = 2,
                       .kv_heads = 1,
                       .causal = true,
                       .softcap = any ? 4.0 : 0});
    }
  }
  for (const auto& [dim_qk, dim_v] : {std::pair{192, 128}, {128, 192}, {64, 256}, {40, 16}, {512, 16}}) {
    cases.push_back({.name = "d" + std::to_string(dim_qk) + "x" + std::to_string(dim_v),
                     .dim_qk = dim_qk,
                     .dim_v = dim_v,
                     .causal = true});
  }
  // Keys on pages and of fewer bits.
  for (const auto& [pages, size] : {std::pair{Pages::kBlockTable, 1},
                                    {Pages::kBlockTable, 16},
                                    {Pages::kBlockTable, 5},
                                    {Pages::kBlockTable, 300},
                                    {Pages::kBlockTableHnd, 16},
                                    {Pages::kTokenTable, 1},
                                    {Pages::kCsr, 16}}) {
    AttentionCase c = {.name = "pages_" + std::to_string(static_cast<int>(pages)) + "_of_" + std::to_string(size)};
    c.pages = pages;
    c.page_size = size;
    c.causal = true;
    c.q_lens = {70, 70, 70};
    c.kv_lens = {203, 0, 131};
    cases.push_back(c);
  }
  for (const auto& [dim, dim_v] :
       {std::pair{64, 64}, {72, 72}, {96, 96}, {128, 128}, {192, 192}, {192, 128}, {256, 256}, {512, 512}}) {
    const std::string dims = std::to_string(dim) + (dim == dim_v ? "" : "x" + std::to_string(dim_v));
    for (const bool fp8 : {false, true}) {
      for (const Type type : {Type::kBF16, Type::kF16}) {
        AttentionCase c = {.name = std::string(fp8 ? "fp8" : "paged") + "_d" + dims + "_" + type_name(type),
                           .type = type,
                           .dim_qk = dim,
                           .dim_v = dim_v,
                           .q_heads = 2,
                           .kv_heads = 1,
                           .q_lens = {70, 33},
                           .kv_lens = {300, 203},
                           .packed = true,
                           .causal = true};
        if (fp8) {
          c.kv_type = Type::kE4M3;
          c.q_fp8 = dim % 128 != 0 || type == Type::kF16;
          c.scales = true;
          c.packed = dim != 256;
          if (!c.packed) c.q_lens = {70, 70}, c.kv_lens = {300, 300};
        } else {
          c.pages = Pages::kBlockTable;
        }
        cases.push_back(c);
      }
    }
  }
  // Each kernel of the tables that has all options, and every kind of page at head dim 128.
  for (const std::int64_t dim : {64, 128, 256}) {
    for (const Type type : {Type::kBF16, Type::kF16}) {
      cases.push_back({.name = "paged_any_d" + std::to_string(dim) + "_" + type_name(type),
                       .type = type,
                       .dim_qk = dim,
                       .dim_v = dim,
                       .q_heads = 2,
                       .kv_heads = 1,
                       .q_lens = {40},
                       .kv_lens = {150},
                       .pages = Pages::kBlockTable,
                       .causal = true,
                       .softcap = 4,
                       .dropout = 0.3});
    }
  }
  for (const Pages pages : {Pages::kBlockTable, Pages::kBlockTableHnd, Pages::kTokenTable, Pages::kCsr}) {
    AttentionCase c = {.name = "pages_" + std::to_string(static_cast<int>(pages)) + "_d128",
                       .dim_qk = 128,
                       .dim_v = 128,
                       .q_heads = 2,
                       .kv_heads = 1,
                       .q_lens = {5, 0, 130, 1},
                       .kv_lens = {70, 3, 203, 0},
                       .packed = true,
                       .pages = pages,
                       .leftpad = true,
                       .causal = true};
    cases.push_back(c);
    c.name += "_fp8";
    c.page_size = 5;
    c.kv_type = Type::kE4M3;
    cases.push_back(c);
  }
  cases.push_back({.name = "pages_of_fp8_with_all_options",
                   .q_lens = {33, 7},
                   .kv_lens = {130, 67},
                   .packed = true,
                   .pages = Pages::kBlockTable,
                   .kv_type = Type::kE4M3,
                   .scales = true,
                   .leftpad = true,
                   .causal = true,
                   .window_left = 50,
                   .softcap = 10,
                   .slopes = Slopes::kOfSequences,
                   .sinks = true,
                   .dropout = 0.3});
  // Logits as far from 0 as caps let them be, of rows with one key, too: weights are not shifted up to the first cap.
  for (const double cap : {50.0, 51.0}) {
    for (const std::int64_t dim : {64, 128, 256}) {
      cases.push_back({.name = "cap_" + std::to_string(static_cast<int>(cap)) + "_d" + std::to_string(dim),
                       .dim_qk = dim,
                       .dim_v = dim,
                       .q_lens = {113, 20, 3},
                       .kv_lens = {203, 1, 0},
                       .packed = true,
                       .softcap = cap,
                       .sinks = dim == 128,
                       .scale = 8.0});
    }
  }
  // Biases whose rows begin at multiples of 16 bytes, and the last keys at any place of a tile.
  const struct {
    std::int64_t q_len, kv_len;
    bool causal;
    int splits;
  } aligned[] = {{113, 200, true, flashport::kInvariantSplits},
                 {300, 256, false, flashport::kInvariantSplits},
                 {130, 640, true, 1},
                 {70, 1024, false, 3},
                 {1, 136, false, flashport::kInvariantSplits}};
  for (const auto& [q_len, kv_len, causal, splits] : aligned) {
    for (const Bias bias : {Bias::kOwnType, Bias::kOwnTypeOfAll}) {
      cases.push_back({.name = "aligned_bias_" + std::to_string(cases.size()),
                       .type = bias == Bias::kOwnType ? Type::kBF16 : Type::kF16,
                       .dim_qk = kv_len == 256 ? 72 : 128,
                       .dim_v = 128,
                       .q_lens = {q_len, q_len},
                       .kv_lens = {kv_len, kv_len},
                       .causal = causal,
                       .window_left = kv_len == 640 ? 300 : -1,
                       .sinks = kv_len == 200,
                       .bias = bias,
                       .layout = kv_len == 200 ? Layout::kOdd : Layout::kProjection,
                       .splits = splits});
    }
  }
  // Each kernel of the tables.
  for (const auto& [dim_qk, dim_v] : {std::pair{64, 64}, {96, 96}, {128, 128}, {192, 128}, {256, 256}, {512, 512}}) {
    for (const Type type : {Type::kBF16, Type::kF16}) {
      for (const char* option : {"plain", "softcap", "dropout", "alibi", "bias"}) {
        const std::string name = option;
        cases.push_back({.name = std::string(type_name(type)) + "_" + name + "_of_tile_" + std::to_string(dim_qk) +
                                 "x" + std::to_string(dim_v),
                         .type = type,
                         .dim_qk = dim_qk,
                         .dim_v = dim_v,
                         .q_heads = 2,
                         .kv_heads = 1,
                         .q_lens = {70},
                         .kv_lens = {100},
                         .causal = true,
                         .softcap = name == "softcap" ? 4.0 : 0,
                         .slopes = name == "alibi" ? Slopes::kOfHeads : Slopes::kNone,
                         .bias = name == "bias" ? Bias::kOwnType : Bias::kNone,
                         .dropout = name == "dropout" ? 0.3 : 0});
      }
    }
  }
  return cases;
}

class AttentionCases : public testing::TestWithParam<AttentionCase> {};

TEST_P(AttentionCases, MatchesTheOracle) {
  FLASHPORT_REQUIRE_SUPPORT(GetParam().support_name(), flashport::supports(GetParam().query()));
  AttentionCall call(GetParam());
  call.run();
  EXPECT_EQ(call.check(), "") << "kernel " << flashport::which_kernel(GetParam().query());
}

INSTANTIATE_TEST_SUITE_P(Named, AttentionCases, testing::ValuesIn(named_cases()),
                         [](const auto& info) { return info.param.name; });

// Combinations `part`, `part` + `parts`, ...; gives how many ran. The others were declined as expected.
int run_combinations(const std::vector<AttentionCase>& all, std::size_t part, std::size_t parts) {
  int done = 0;
  for (std::size_t i = part; i < all.size(); i += parts) {
    const AttentionCase& c = all[i];
    const flashport::Support support = flashport::supports(c.query());
    const std::string said = verdict(c.support_name(), support.supported, support.reason);
    if (said.starts_with("skip")) continue;
    EXPECT_EQ(said, "") << c;
    if (!support.supported) continue;
    AttentionCall call(c);
    call.run();
    EXPECT_EQ(call.check(), "") << c;
    ++done;
  }
  return done;
}

// Every option alone and every pair.
TEST(AttentionCombinations, FewOptions) {
  const std::vector<AttentionCase> all = attention_combinations(2, 1, 31);
  EXPECT_GT(run_combinations(all, 0, options().emulator ? 6 : 1), 20);
}

constexpr std::size_t kParts = 8;
std::vector<AttentionCase> many_combinations() { return attention_combinations(3, 4, 32); }

class FullAttentionCombinations : public testing::TestWithParam<std::size_t> {};

TEST_P(FullAttentionCombinations, MatchTheOracle) {
  // fp32, and formats of caches on some targets, are declined: at least half is run everywhere.
  const std::vector<AttentionCase> all = many_combinations();
  const int done = run_combinations(all, GetParam(), kParts);
  EXPECT_GT(done, static_cast<int>(all.size() / kParts / 2));
  RecordProperty("combinations", done);
}

INSTANTIATE_TEST_SUITE_P(Full, FullAttentionCombinations, testing::Range(std::size_t{0}, kParts));

TEST(AttentionCombinations, AreManyAndHaveEveryOption) {
  const std::vector<AttentionCase> all = many_combinations();
  EXPECT_GE(all.size(), 2000u);
  const auto some = [&](const auto& wanted) { return std::ranges::any_of(all, wanted); };
  EXPECT_TRUE(some([](const AttentionCase& c) { return c.packed && c.softcap > 0 && c.sinks && c.dropout > 0; }));
  EXPECT_TRUE(some([](const AttentionCase& c) { return c.bias == Bias::kOfAllHeads && c.causal; }));
  EXPECT_TRUE(some([](const AttentionCase& c) { return c.used_q && c.used_k && c.leftpad && c.packed; }));
}

TEST(AttentionInstances, CasesReachEveryKernel) {
  std::vector<AttentionCase> all = named_cases();
  for (const AttentionCase& c : attention_combinations(2, 1, 31)) all.push_back(c);
  std::set<std::string> reached;
  for (const AttentionCase& c : all) {
    if (flashport::supports(c.query()).supported) reached.insert(flashport::which_kernel(c.query()));
  }
  for (const std::string& key : flashport::kernel_keys(query_target())) {
    if (!key.starts_with("attention/")) continue;
    EXPECT_TRUE(reached.contains(key)) << "no case runs " << key;
  }
}

}  // namespace
}  // namespace flashport_test
