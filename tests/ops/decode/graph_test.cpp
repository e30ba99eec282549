// Calls in graphs: lengths change between replays of one graph, and two graphs captured on one stream run concurrently
// on two; other threads may allocate while one captures. Bits are those of an eager call.
#include <gtest/gtest.h>

#include <exception>
#include <string>
#include <thread>

#include <flashport/error.h>

#include "tests/ops/decode/request_pool.h"
#include "tests/support/graphs.h"
#include "tests/support/random.h"

namespace flashport_test {
namespace {

using reference::Type;

const PoolShape kShape{"graph", Type::kBF16, Type::kBF16, 128, 128, 8, 2, 16, 1};

std::vector<std::int64_t> longest() {
  if (options().emulator) return {200, 65, 130, 1};
  return {20000, 1025, 64, 3000, 17, 5000, 1024, 300};
}

std::vector<std::int64_t> everyone() {
  std::vector<std::int64_t> ids(longest().size());
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int64_t>(i);
  return ids;
}

std::vector<std::int64_t> random_lengths(Random& random) {
  std::vector<std::int64_t> lens = longest();
  for (std::int64_t& len : lens) len = random.below(4) == 0 ? len : random.below(len + 1);
  return lens;
}

RequestPool::Bits eager(RequestPool::Call& call, const std::vector<std::int64_t>& lens) {
  call.set_lengths(lens);
  call.poison_outputs();
  flashport::flash_decode(call.args());
  return call.fetch();
}

TEST(Graphs, ReplayWithOtherLengths) {
  if (!has_graphs()) GTEST_SKIP() << "a CPU has no graphs";
  const RequestPool pool(kShape, longest(), 21);
  for (int splits : {flashport::kInvariantSplits, 3}) {
    RequestPool::Call captured(pool, everyone(), false), reference(pool, everyone(), false);
    captured.args().num_splits = reference.args().num_splits = splits;
    const DeviceStream stream;
    flashport::flash_decode(captured.args(), stream.handle());  // prepares the workspace of the capture
    stream.synchronize();
    const DeviceGraph graph(stream, [&] { flashport::flash_decode(captured.args(), stream.handle()); });
    Random random(22);
    for (int replay = 0; replay < (options().emulator ? 3 : 100); ++replay) {
      const std::vector<std::int64_t> lens = random_lengths(random);
      const RequestPool::Bits expected = eager(reference, lens);
      captured.set_lengths(lens);
      captured.poison_outputs();
      graph.launch(stream);
      stream.synchronize();
      ASSERT_TRUE(captured.fetch() == expected) << "splits " << splits << ", replay " << replay;
    }
  }
}

// In global mode a capture would be spoiled by the first allocation of any thread.
TEST(Graphs, SurviveWorkspacesThatOtherThreadsAllocate) {
  if (!has_graphs()) GTEST_SKIP() << "a CPU has no graphs";
  const RequestPool pool(kShape, longest(), 25);
  RequestPool::Call captured(pool, everyone(), false), reference(pool, everyone(), false);
  RequestPool::Call few_splits(pool, everyone(), false), meanwhile(pool, everyone(), false);
  few_splits.args().num_splits = 2;
  const RequestPool::Bits expected = eager(reference, longest());
  const DeviceStream stream, other;
  flashport::flash_decode(captured.args(), stream.handle());
  stream.synchronize();
  for (RequestPool::Call* call : {&captured, &meanwhile}) call->poison_outputs();
  synchronize();

  std::string error;
  const auto decode_beside = [&] {
    try {
      flashport::flash_decode(few_splits.args(), other.handle());  // allocates
      flashport::flash_decode(meanwhile.args(), other.handle());   // grows: waits, frees, allocates
    } catch (const std::exception& e) {
      error = e.what();
    }
  };
  const auto work = [&] {
    flashport::flash_decode(captured.args(), stream.handle());
    std::thread(decode_beside).join();
  };
  const DeviceGraph graph(stream, work, CaptureMode::kGlobal);
  EXPECT_EQ(error, "");
  other.synchronize();
  EXPECT_TRUE(meanwhile.fetch() == expected);
  graph.launch(stream);
  stream.synchronize();
  EXPECT_TRUE(captured.fetch() == expected);
}

TEST(Graphs, TwoOfOneStreamRunSideBySide) {
  if (!has_graphs()) GTEST_SKIP() << "a CPU has no graphs";
  const RequestPool pool(kShape, longest(), 23);
  RequestPool::Call first(pool, everyone(), false), second(pool, everyone(), false), reference(pool, everyone(), false);
  const DeviceStream one, two;
  flashport::flash_decode(first.args(), one.handle());
  one.synchronize();
  const DeviceGraph first_graph(one, [&] { flashport::flash_decode(first.args(), one.handle()); });
  flashport::flash_decode(second.args(), one.handle());
  one.synchronize();
  const DeviceGraph second_graph(one, [&] { flashport::flash_decode(second.args(), one.handle()); });
  Random random(24);
  for (int round = 0; round < (options().emulator ? 2 : 50); ++round) {
    const std::vector<std::int64_t> first_lens = random_lengths(random), second_lens = random_lengths(random);
    const RequestPool::Bits first_bits = eager(reference, first_lens), second_bits = eager(reference, second_lens);
    first.set_lengths(first_lens);
    second.set_lengths(second_lens);
    first.poison_outputs();
    second.poison_outputs();
    for (int again = 0; again < 4; ++again) {
      first_graph.launch(one);
      second_graph.launch(two);
    }
    one.synchronize();
    two.synchronize();
    ASSERT_TRUE(first.fetch() == first_bits) << round;
    ASSERT_TRUE(second.fetch() == second_bits) << round;
  }
}

}  // namespace
}  // namespace flashport_test
