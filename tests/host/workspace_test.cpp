// Workspaces over eager calls, captures and streams.
#include "common/host/workspace.h"

#include <gtest/gtest.h>

#include <set>
#include <thread>

#include "common/device/merge/params.h"
#include "tests/host/decode/decode_inputs.h"
#include "tests/host/fake_backend.h"

namespace flashport::test {
namespace {

constexpr Check kCheck("f");
constexpr std::int64_t kMiB = 1 << 20;

class Workspace : public ::testing::Test {
 protected:
  void* take(Stream stream, std::int64_t bytes, std::uint64_t capture = 0) {
    fake_state().capture = capture;
    return acquire_workspace(kCheck, gpu_, stream, bytes, std::nullopt).data();
  }
  FakeBackends backends_;
  DeviceContext& gpu_ = device_context(kCheck, TensorView(nullptr, DType::kFloat32, kGpu, {1}), "x");
};

TEST_F(Workspace, IsZeroAndKeptPerStream) {
  auto* first = static_cast<unsigned char*>(take(10, kMiB));
  for (std::int64_t i = 0; i < kMiB; ++i) ASSERT_EQ(first[i], 0);
  EXPECT_EQ(take(10, 1000), first);
  EXPECT_NE(take(11, 1000), first);
  const int allocations = fake_state().allocations;
  (void)take(10, kMiB);
  (void)take(11, kMiB);
  EXPECT_EQ(fake_state().allocations, allocations);
}

// What a call leaves in scratch never appears where another call expects zeros.
TEST_F(Workspace, ScratchIsNoOnesCounters) {
  DeviceContext& cpu = device_context(kCheck, TensorView(nullptr, DType::kFloat32, Device{}, {1}), "x");
  for (DeviceContext* device : {&gpu_, &cpu}) {
    const auto of = [&](WorkspaceUse use) {
      return acquire_workspace(kCheck, *device, 10, kMiB, std::nullopt, use).data();
    };
    void* counters = of(WorkspaceUse::kCounters);
    void* scratch = of(WorkspaceUse::kScratch);
    EXPECT_NE(scratch, counters);
    EXPECT_EQ(of(WorkspaceUse::kCounters), counters);
    EXPECT_EQ(of(WorkspaceUse::kScratch), scratch);
  }
  // Nor in the spares that captures take.
  fake_state().capture = 1;
  const auto captured = [&](WorkspaceUse use) {
    return acquire_workspace(kCheck, gpu_, 10, kMiB, std::nullopt, use).data();
  };
  EXPECT_NE(captured(WorkspaceUse::kScratch), captured(WorkspaceUse::kCounters));
}

TEST_F(Workspace, GrowsOutsideOfCapturesAndFreesTheOldOne) {
  (void)take(10, kMiB);
  EXPECT_EQ(fake_state().live_allocations, 2);  // its own and a spare
  (void)take(10, 5 * kMiB);
  EXPECT_EQ(fake_state().live_allocations, 2);
}

TEST_F(Workspace, CapturesNeedAnEagerCallBefore) {
  const std::string text = error_of<ValueError>([&] { (void)take(10, kMiB, 1); });
  EXPECT_NE(text.find("run the call once before you capture, or pass workspace"), std::string::npos) << text;
  (void)take(10, kMiB);
  EXPECT_NE(error_of<ValueError>([&] { (void)take(10, 2 * kMiB, 1); }), "");  // the spare is too small
  EXPECT_NO_THROW((void)take(10, kMiB, 1));
}

TEST_F(Workspace, EveryCaptureHasItsOwnForGood) {
  void* eager = take(10, kMiB);
  void* first = take(10, kMiB, 1);
  EXPECT_NE(first, eager);
  EXPECT_EQ(take(10, 1000, 1), first);  // one stream of one capture shares
  EXPECT_NE(error_of<ValueError>([&] { (void)take(10, kMiB, 2); }), "");
  EXPECT_EQ(take(10, kMiB), eager);  // prepares the next spare
  const int allocations = fake_state().allocations;
  void* second = take(10, kMiB, 2);
  EXPECT_NE(second, first);
  EXPECT_NE(second, eager);
  EXPECT_EQ(fake_state().allocations, allocations);  // none while capturing
  (void)take(10, 8 * kMiB);
  EXPECT_EQ(take(10, kMiB, 1), first);  // growth elsewhere leaves graphs alone
}

TEST_F(Workspace, StreamsOfOneCaptureDoNotShare) {
  (void)take(10, kMiB);
  (void)take(11, kMiB);
  void* a = take(10, kMiB, 1);
  void* b = take(11, kMiB, 1);
  EXPECT_NE(a, b);
}

TEST_F(Workspace, ASpareMayServeAnotherStream) {
  (void)take(10, kMiB);
  EXPECT_NO_THROW((void)take(99, kMiB, 1));  // capture runs on a stream of its own
}

TEST_F(Workspace, CallersOwn) {
  TensorView own(scratch(), DType::kUInt8, kGpu, {4096});
  EXPECT_EQ(acquire_workspace(kCheck, gpu_, 10, 4096, own).data(), scratch());
  EXPECT_EQ(error_of<ValueError>([&] { (void)acquire_workspace(kCheck, gpu_, 10, 4097, own); }),
            "f: workspace must have at least 4097 bytes, got 4096");
  own.data = scratch_at(8);
  EXPECT_NE(error_of<ValueError>([&] { (void)acquire_workspace(kCheck, gpu_, 10, 4096, own); }).find("16 bytes"),
            std::string::npos);
  EXPECT_EQ(fake_state().allocations, 0);
}

TEST_F(Workspace, OutOfMemory) {
  fake_state().fail_allocations = true;
  EXPECT_EQ(error_of<BackendError>([&] { (void)take(10, kMiB); }), "f: cuda:0: fake: out of memory");
  fake_state().fail_allocations = false;
  EXPECT_NO_THROW((void)take(10, kMiB));
}

TEST_F(Workspace, CpuThreadsDoNotShare) {
  DeviceContext& cpu = device_context(kCheck, TensorView(nullptr, DType::kFloat32, Device{}, {1}), "x");
  void* first = nullptr;
  {
    const WorkspaceLease held = acquire_workspace(kCheck, cpu, 0, kMiB, std::nullopt);
    first = held.data();
    std::thread([&] { EXPECT_NE(acquire_workspace(kCheck, cpu, 0, kMiB, std::nullopt).data(), first); }).join();
  }
  EXPECT_EQ(acquire_workspace(kCheck, cpu, 0, kMiB, std::nullopt).data(), first);
}

TEST_F(Workspace, TwoLaunchesOfASplitCallUseOne) {
  DecodeInputs inputs(kGpu);
  inputs.args.num_splits = 2;
  flash_decode(inputs.args, 10);
  const auto& launches = fake_state().launches;
  ASSERT_EQ(launches.size(), 2u);
  EXPECT_EQ(launches[0].as<DecodeParams>().out.data, launches[1].as<Stage2Params>().mid.data);
  EXPECT_EQ(launches[0].stream, 10u);
  EXPECT_EQ(launches[1].key, "decode_stage2/fakegpu");
}

}  // namespace
}  // namespace flashport::test
