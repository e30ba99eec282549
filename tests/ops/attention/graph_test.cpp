// Attention in graphs: offsets change between replays of one graph. Bits are those of an eager call.
#include <gtest/gtest.h>

#include <flashport/attention.h>

#include "tests/ops/attention/call.h"
#include "tests/support/expected_support.h"
#include "tests/support/graphs.h"
#include "tests/support/random.h"

namespace flashport_test {
namespace {

AttentionCase packed_case(bool any) {
  AttentionCase c = {.name = any ? "graph_any" : "graph", .dim_qk = 128, .dim_v = 128, .packed = true, .causal = true};
  c.q_lens =
      options().emulator ? std::vector<std::int64_t>{65, 1, 40} : std::vector<std::int64_t>{1500, 65, 300, 1, 700};
  c.kv_lens = c.q_lens;
  for (std::int64_t& length : c.kv_lens) length += 50;
  if (any) {
    c.softcap = 10;
    c.slopes = Slopes::kOfHeads;
    c.dropout = 0.25;
  }
  return c;
}

void replay_with_other_lengths(const AttentionCase& c) {
  FLASHPORT_REQUIRE_SUPPORT(c.support_name(), flashport::supports(c.query()));
  AttentionCall call(c);
  const flashport::AttentionArgs args = call.args();
  const DeviceStream stream;
  flashport::attention(args, stream.handle());  // prepares the workspace of the capture
  stream.synchronize();
  const DeviceGraph graph(stream, [&] { flashport::attention(args, stream.handle()); });
  Random random(22);
  for (int replay = 0; replay < (options().emulator ? 3 : 50); ++replay) {
    // The offsets are those of other sequences of as many tokens.
    std::vector<std::int64_t> q_lens = c.q_lens, kv_lens = c.kv_lens;
    for (std::size_t b = 0; b < q_lens.size(); ++b) {
      q_lens[b] = random.below(q_lens[b] + 1);
      kv_lens[b] = random.below(4) == 0 ? q_lens[b] : random.below(kv_lens[b] + 1);
    }
    call.set_lengths(q_lens, kv_lens);
    call.run();
    const std::vector<unsigned char> expected = call.bits();
    call.poison_outputs();
    graph.launch(stream);
    stream.synchronize();
    call.fetch();
    ASSERT_TRUE(call.bits() == expected) << "replay " << replay;
  }
}

TEST(AttentionGraphs, ReplayWithOtherLengths) {
  if (!has_graphs()) GTEST_SKIP() << "a CPU has no graphs";
  replay_with_other_lengths(packed_case(false));
}

TEST(AttentionGraphs, ReplayOfModifiedScoresWithOtherLengths) {
  if (!has_graphs()) GTEST_SKIP() << "a CPU has no graphs";
  replay_with_other_lengths(packed_case(true));
}

// Offsets move while the tensors and the call stay, as between the replays of a graph.
TEST(AttentionGraphs, EagerCallsWithOtherLengths) {
  const AttentionCase c = packed_case(false);
  FLASHPORT_REQUIRE_SUPPORT(c.support_name(), flashport::supports(c.query()));
  AttentionCall call(c);
  const flashport::AttentionArgs args = call.args();
  Random random(23);
  for (int i = 0; i < (options().emulator ? 1 : 5); ++i) {
    std::vector<std::int64_t> q_lens = c.q_lens, kv_lens = c.kv_lens;
    for (std::int64_t& length : q_lens) length = random.below(length + 1);
    call.set_lengths(q_lens, kv_lens);
    call.poison_outputs();
    flashport::attention(args);
    call.fetch();
    EXPECT_EQ(call.check(), "") << i;
  }
}

}  // namespace
}  // namespace flashport_test
