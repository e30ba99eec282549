// Whole kernels of sm90a that decode and append, by their own text on a multiprocessor of the host (machine.h): the
// cache as it should be afterwards, and the bits of a call without new keys on such a cache.
#include <gtest/gtest.h>

#include <flashport/attention.h>
#include <flashport/backend.h>

#include "tests/device/decode/model_tables.h"
#include "tests/device/machine/model_backend.h"
#include "tests/ops/attention/append_call.h"

namespace flashport_test {
namespace {

using flashport::machine::model;

// A block appends for six query tiles at most, so there are two blocks and more.
class AppendKernels : public testing::TestWithParam<bool> {  // whether calls are plain
 protected:
  static AppendCase make() {
    return {.name = GetParam() ? "plain" : "all",
            .before = {0, 62, 63, 64, 126, 302},
            .added = {2, 2, 2, 2, 2, 2},
            .queries = {2, 2, 2, 2, 2, 2},
            .pages = Pages::kBlockTable,
            .dim_qk = 128,
            .dim_v = 128,
            .rotary_dim = 128,
            .room = 304,
            .lse = !GetParam()};
  }
  static void expect_two_calls(const AppendCase& c) {
    AppendCall call(c);
    call.upload();
    const std::vector<unsigned char> got = run(call, call.appending_args());
    EXPECT_TRUE(model().launched.front().starts_with("decode_append/")) << model().launched.front();
    EXPECT_EQ(model().launched.front().find("/plain/") != std::string::npos, GetParam()) << model().launched.front();
    call.make_wanted();
    EXPECT_EQ(call.check_caches(), "") << "seed " << model().seed - 1;
    EXPECT_EQ(call.out().damage(), "");
    call.upload();
    EXPECT_TRUE(got == run(call, call.args())) << "seed " << model().seed - 1;
  }
  static std::vector<unsigned char> run(AppendCall& call, const flashport::AttentionArgs& args) {
    model().launched.clear();
    flashport::attention(args);
    return call.fetch();
  }
  void TearDown() override { flashport::set_multiprocessor_limit(0); }
};

TEST_P(AppendKernels, LeaveTheCacheAndGiveTheBitsOfTwoCalls) {
  for (const int blocks : {2, 5}) {
    SCOPED_TRACE(blocks);
    flashport::set_multiprocessor_limit(blocks);
    AppendCase c = make();
    for (const Rotary rotary : {Rotary::kNone, Rotary::kHalves, Rotary::kInterleaved}) {
      c.rotary = rotary;
      expect_two_calls(c);
    }
    c.pages = Pages::kTokenTable;
    c.queries = c.added = {1, 1, 1, 1, 1, 1};
    expect_two_calls(c);
    c.added = {1, 0, 9, 0, 3, 2};  // and how many is an array's word
    c.packed_new = true;
    expect_two_calls(c);
  }
}

// Ranges are found while the kernel before runs, which may write the lengths.
TEST_P(AppendKernels, LengthsThatTheKernelBeforeWrites) {
  const AppendCase c = make();
  AppendCall right(c);
  right.upload();
  const std::vector<unsigned char> wanted = run(right, right.appending_args());
  right.make_wanted();
  EXPECT_EQ(right.check_caches(), "");
  for (const std::int64_t before : {-7, 0, 64, 302, 304, 1 << 30}) {
    for (const int blocks : {2, 6}) {
      SCOPED_TRACE(std::to_string(before) + ", " + std::to_string(blocks) + " blocks");
      flashport::set_multiprocessor_limit(blocks);
      AppendCall call(c);
      call.upload();
      const auto write = [&](const auto& length) {
        for (std::size_t i = 0; i < c.before.size(); ++i) {
          call.seqlens().set({static_cast<std::int64_t>(i)}, static_cast<double>(length(i)));
        }
        call.seqlens().upload();
      };
      write([&](std::size_t) { return before; });
      model().kernel_before = [&] { write([&](std::size_t i) { return c.before[i]; }); };
      EXPECT_TRUE(run(call, call.appending_args()) == wanted) << "seed " << model().seed - 1;
      model().kernel_before = nullptr;
      call.make_wanted();
      EXPECT_EQ(call.check_caches(), "");
    }
  }
}

// Pages that have new keys alone may be no pages: those keys are where the caller has them.
TEST_P(AppendKernels, PagesOfNewKeysAreNotRead) {
  AppendCase c = make();
  c.before = {0, 56, 64, 128, 120, 296};
  AppendCall right(c), call(c);
  right.upload();
  const std::vector<unsigned char> wanted = run(right, right.appending_args());
  for (std::size_t i = 0; i < c.before.size(); ++i) {
    call.block_table().set({static_cast<std::int64_t>(i), c.before[i] / AppendCall::kPageSize}, 1e9);
  }
  call.upload();
  EXPECT_TRUE(run(call, call.appending_args()) == wanted) << "seed " << model().seed - 1;
}

INSTANTIATE_TEST_SUITE_P(Model, AppendKernels, testing::Bool(),
                         [](const auto& info) { return std::string(info.param ? "plain" : "all"); });

}  // namespace
}  // namespace flashport_test
