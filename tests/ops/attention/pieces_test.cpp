// Keys cut into pieces: results against the oracle, with every option that a merge has to do with; bits that follow
// from a sequence's own lengths; what must not be written; workspaces and graphs.
#include <gtest/gtest.h>

#include <flashport/attention.h>
#include <flashport/backend.h>

#include <algorithm>

#include "tests/ops/attention/call.h"
#include "tests/ops/decode/call.h"
#include "tests/support/expected_support.h"
#include "tests/support/graphs.h"
#include "tests/support/random.h"

namespace flashport_test {
namespace {

using reference::Type;
using Lengths = std::vector<std::int64_t>;
using Bits = std::vector<unsigned char>;

// The keys of the tiles of the case's kernel.
std::int64_t tile_keys(const AttentionCase& c) {
  return flashport::explain(
             flashport::AttentionScheduleQuery{
                 .call = c.query(), .num_q_heads = c.q_heads, .num_kv_heads = c.kv_heads, .num_splits = 1})
      .keys;
}

std::int64_t workspace_bytes(const AttentionCall& call) { return flashport::attention_workspace_size(call.args()); }

// Cases whose kv_lens count key tiles; a tile has another size in each kernel.
std::vector<AttentionCase> forced_cases() {
  return {
      {.name = "pieces_plain", .dim_qk = 128, .dim_v = 128},
      {.name = "pieces_causal", .causal = true},
      {.name = "pieces_packed", .dim_qk = 128, .dim_v = 128, .packed = true, .causal = true},
      {.name = "pieces_in_use", .packed = true, .used_q = true, .used_k = true, .leftpad = true, .causal = true},
      {.name = "pieces_leftpad", .used_k = true, .leftpad = true, .causal = true, .sinks = true},
      {.name = "pieces_window", .causal = true, .window_left = 90, .sinks = true},
      {.name = "pieces_two_sides", .window_left = 130, .window_right = 40},
      {.name = "pieces_sinks_dropout", .type = Type::kF16, .causal = true, .sinks = true, .dropout = 0.3},
      {.name = "pieces_alibi_softcap",
       .dim_qk = 96,
       .dim_v = 96,
       .packed = true,
       .causal = true,
       .softcap = 8,
       .slopes = Slopes::kOfHeads},
      {.name = "pieces_bias", .bias = Bias::kOwnType, .layout = Layout::kOdd},
      {.name = "pieces_odd_rows", .causal = true, .layout = Layout::kOdd},
      {.name = "pieces_no_lse", .causal = true, .sinks = true, .lse = false, .layout = Layout::kGaps},
      {.name = "pieces_d40x72", .dim_qk = 40, .dim_v = 72, .causal = true},
      {.name = "pieces_d192x128", .dim_qk = 192, .dim_v = 128, .q_heads = 2, .kv_heads = 1, .causal = true},
      {.name = "pieces_d256", .dim_qk = 256, .dim_v = 256, .q_heads = 2, .kv_heads = 1, .causal = true},
      {.name = "pieces_d512", .dim_qk = 512, .dim_v = 512, .q_heads = 2, .kv_heads = 1, .causal = true},
      {.name = "pieces_of_pages",
       .dim_qk = 128,
       .dim_v = 128,
       .packed = true,
       .pages = Pages::kBlockTable,
       .leftpad = true,
       .causal = true},
      {.name = "pieces_of_fp8_pages",
       .dim_qk = 128,
       .dim_v = 128,
       .pages = Pages::kCsr,
       .kv_type = Type::kE4M3,
       .scales = true,
       .causal = true,
       .window_left = 90},
      {.name = "pieces_fp32", .type = Type::kF32, .causal = true, .softcap = 5},
  };
}

// Sequences that are cut, that are not (one key tile, no keys), and of more queries than a work tile has.
AttentionCase with_lengths(AttentionCase c) {
  const std::int64_t keys = tile_keys(c);
  if (c.packed) {
    c.q_lens = options().emulator ? Lengths{33, 5, 2} : Lengths{130, 5, 33, 0, 200, 1};
    c.kv_lens = options().emulator ? Lengths{2 * keys + 9, 7, 0} : Lengths{4 * keys + 9, 7, 0, 5, 150, 7 * keys};
  } else {
    const std::int64_t tiles = options().emulator ? 2 : 7;
    c.q_lens = {options().emulator ? 20 : 150};
    c.kv_lens = {tiles * keys + 37};
    if (c.used_k) {
      c.q_lens.push_back(c.q_lens[0]);
      c.kv_lens.push_back(keys + 3);
    }
  }
  return c;
}

class AttentionPieces : public testing::TestWithParam<AttentionCase> {};

TEST_P(AttentionPieces, MatchTheOracle) {
  FLASHPORT_REQUIRE_SUPPORT(GetParam().support_name(), flashport::supports(GetParam().query()));
  AttentionCase c = with_lengths(GetParam());
  for (const int splits : options().emulator ? std::vector{3} : std::vector{2, 3, 7, 128}) {
    c.splits = splits;
    AttentionCall call(c);
    EXPECT_GT(workspace_bytes(call), 256);
    call.run();
    EXPECT_EQ(call.check(), "") << c;
  }
}

INSTANTIATE_TEST_SUITE_P(Forced, AttentionPieces, testing::ValuesIn(forced_cases()),
                         [](const auto& info) { return info.param.name; });

// Operations share the workspace that is kept: partial results lie apart from the counters of decode, which stay zero.
TEST(AttentionPieces, LeaveTheCountersOfDecodeAlone) {
  AttentionCase c = {.name = "pieces_before_decode", .dim_qk = 64, .dim_v = 64, .q_heads = 8, .kv_heads = 8};
  c.q_lens = {20};
  c.kv_lens = {options().emulator ? 300 : 3000};
  c.splits = 7;
  FLASHPORT_REQUIRE_SUPPORT(c.support_name(), flashport::supports(c.query()));
  DecodeCase d{};
  d.name = "decode_after_pieces";
  d.q = d.k_format = d.v_format = Type::kBF16;
  d.dk = d.dv = 64;
  d.hq = d.hkv = 8;
  d.q_len = 4;
  d.q_form = "uniform";
  d.layout = "nhd";
  d.lens = {options().emulator ? 300 : 5000, 77};
  d.window_left = d.window_right = -1;
  d.alibi = d.scales = d.strides = "none";
  d.splits = flashport::kInvariantSplits;
  DecodeCall decode(d);
  decode.upload();
  decode.run();
  const auto before = decode.bits();
  AttentionCall call(c);
  call.run();
  EXPECT_EQ(call.check(), "");
  decode.run();
  EXPECT_EQ(decode.bits(), before);
}

// Few queries on many keys, which the rule cuts, beside sequences that it leaves whole.
AttentionCase few_queries(bool modified = false) {
  AttentionCase c = {.name = modified ? "few_queries_any" : "few_queries", .dim_qk = 128, .dim_v = 128, .causal = true};
  c.q_heads = options().emulator ? 1 : 4;
  c.kv_heads = options().emulator ? 1 : 2;
  if (modified) {
    c.sinks = true;
    c.softcap = 10;
    c.slopes = Slopes::kOfHeads;
  }
  c.packed = true;
  c.q_lens = options().emulator ? Lengths{9, 3} : Lengths{20, 300, 1, 40, 7, 700, 0};
  c.kv_lens = options().emulator ? Lengths{2100, 200} : Lengths{5000, 2900, 3100, 300, 2047, 700, 4000};
  for (std::size_t i = 0; i < c.q_lens.size(); ++i) c.ids.push_back(static_cast<std::int64_t>(i));
  return c;
}

AttentionCase alone(const AttentionCase& all, std::size_t i) {
  AttentionCase c = all;
  c.ids = {all.ids[i]};
  c.q_lens = {all.q_lens[i]};
  c.kv_lens = {all.kv_lens[i]};
  return c;
}

class AttentionByLengths : public testing::TestWithParam<bool> {
 protected:
  void TearDown() override { flashport::set_multiprocessor_limit(options().emulator ? 3 : 0); }
};

TEST_P(AttentionByLengths, MatchesTheOracle) {
  AttentionCase c = few_queries(GetParam());
  FLASHPORT_REQUIRE_SUPPORT(c.support_name(), flashport::supports(c.query()));
  c.used_q = c.used_k = c.leftpad = true;
  AttentionCall call(c);
  EXPECT_GT(workspace_bytes(call), 256);
  call.run();
  EXPECT_EQ(call.check(), "") << c;
}

TEST_P(AttentionByLengths, AloneInABatchAndOnAnyNumberOfMultiprocessors) {
  const AttentionCase all = few_queries(GetParam());
  FLASHPORT_REQUIRE_SUPPORT(all.support_name(), flashport::supports(all.query()));
  AttentionCase reordered = all;
  std::ranges::reverse(reordered.ids);
  std::ranges::reverse(reordered.q_lens);
  std::ranges::reverse(reordered.kv_lens);
  std::vector<Bits> expected;
  for (std::size_t i = 0; i < all.ids.size(); ++i) {
    AttentionCase one = alone(all, i);
    one.packed = i % 2 == 0;
    AttentionCall call(one);
    call.run();
    expected.push_back(call.bits(0));
  }
  for (const bool packed : {true, false}) {
    AttentionCase c = packed ? all : reordered;
    c.packed = packed;
    c.used_q = c.used_k = !packed;
    AttentionCall call(c);
    for (const int limit : {1, 7, 0}) {
      if (options().emulator && limit != 7) continue;
      flashport::set_multiprocessor_limit(limit);
      call.run();
      for (std::size_t i = 0; i < c.ids.size(); ++i) {
        EXPECT_TRUE(call.bits(static_cast<std::int64_t>(i)) == expected[static_cast<std::size_t>(c.ids[i])])
            << limit << " multiprocessors, index " << i << " of " << c;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Scores, AttentionByLengths, testing::Bool(),
                         [](const auto& info) { return info.param ? "Modified" : "Plain"; });

// Which sequences are cut shows in their bits: those of the others are as with one piece, rounded once.
TEST(AttentionPieceRule, LeavesPromptsWhole) {
  AttentionCase c = few_queries();
  FLASHPORT_REQUIRE_SUPPORT(c.support_name(), flashport::supports(c.query()));
  AttentionCall by_lengths(c);
  by_lengths.run();
  c.splits = 1;
  AttentionCall whole(c);
  whole.run();
  EXPECT_EQ(workspace_bytes(whole), 256);
  for (std::size_t i = 0; i < c.ids.size(); ++i) {
    if (c.q_lens[i] == 0) continue;
    const bool is_cut = c.kv_lens[i] >= 2048 && c.kv_lens[i] >= 8 * c.q_lens[i];
    const auto sequence = static_cast<std::int64_t>(i);
    EXPECT_EQ(by_lengths.bits(sequence) != whole.bits(sequence), is_cut) << c.q_lens[i] << " on " << c.kv_lens[i];
  }
}

TEST(AttentionPieceRule, PublishedHeuristic) {
  AttentionCase c = few_queries();
  FLASHPORT_REQUIRE_SUPPORT(c.support_name(), flashport::supports(c.query()));
  c.splits = 0;
  AttentionCall call(c);
  call.run();
  EXPECT_EQ(call.check(), "");
}

// Partial results may hold anything before a call; the counter is zero after it.
TEST(AttentionPieceWorkspace, OfTheCaller) {
  const AttentionCase c = few_queries();
  FLASHPORT_REQUIRE_SUPPORT(c.support_name(), flashport::supports(c.query()));
  AttentionCall call(c);
  call.run();
  const Bits expected = call.bits();
  flashport::AttentionArgs args = call.args();
  const std::int64_t bytes = workspace_bytes(call);
  const DeviceBuffer workspace(static_cast<std::size_t>(bytes));
  Bits contents(static_cast<std::size_t>(bytes), 0xff);
  std::fill_n(contents.begin(), 256, 0);
  workspace.write(contents.data());
  args.workspace = flashport::TensorView(workspace.data(), flashport::DType::kUInt8, device(), {bytes});
  for (int repeat = 0; repeat < 2; ++repeat) {
    call.poison_outputs();
    flashport::attention(args);
    call.fetch();
    EXPECT_TRUE(call.bits() == expected) << repeat;
    workspace.read(contents.data());
    EXPECT_TRUE(std::all_of(contents.begin(), contents.begin() + 256, [](unsigned char x) { return x == 0; }));
  }
}

// A sequence may be cut in one replay and whole in the next.
TEST(AttentionPieceGraphs, ReplayWithOtherLengths) {
  if (!has_graphs()) GTEST_SKIP() << "a CPU has no graphs";
  AttentionCase c = few_queries();
  FLASHPORT_REQUIRE_SUPPORT(c.support_name(), flashport::supports(c.query()));
  AttentionCall call(c);
  const flashport::AttentionArgs args = call.args();
  const DeviceStream stream;
  flashport::attention(args, stream.handle());  // prepares the workspace of the capture
  stream.synchronize();
  const DeviceGraph graph(stream, [&] { flashport::attention(args, stream.handle()); });
  Random random(24);
  for (int replay = 0; replay < (options().emulator ? 1 : 12); ++replay) {
    Lengths q_lens = c.q_lens, kv_lens = c.kv_lens;
    for (std::size_t b = 0; b < q_lens.size(); ++b) {
      q_lens[b] = random.below(q_lens[b] + 1);
      if (random.below(2) == 0) kv_lens[b] = random.below(kv_lens[b] + 1);
    }
    call.set_lengths(q_lens, kv_lens);
    call.run();
    const Bits expected = call.bits();
    call.poison_outputs();
    graph.launch(stream);
    stream.synchronize();
    call.fetch();
    ASSERT_TRUE(call.bits() == expected) << "replay " << replay;
    EXPECT_EQ(call.check(), "") << "replay " << replay;
  }
}

}  // namespace
}  // namespace flashport_test
