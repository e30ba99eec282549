// What a launch hands to the backend: the grid, and the params, which the kernel's entry may complete.
#include <gtest/gtest.h>

#include <cstdint>

#include "common/host/devices.h"
#include "tests/host/decode/decode_inputs.h"
#include "tests/host/fake_backend.h"

namespace flashport::test {
namespace {

constexpr Check kCheck("f");

struct Params {
  std::int64_t tokens;
  std::int64_t map;  // made by prepare
};

const char* make_map(void* params) {
  auto& p = *static_cast<Params*>(params);
  if (p.tokens < 0) return "no map of fewer than 0 tokens";
  p.map = 100 + p.tokens;
  return nullptr;
}

class Launches : public ::testing::Test {
 protected:
  FakeBackends backends_;
  DeviceContext& gpu_ = device_context(kCheck, TensorView(nullptr, DType::kFloat32, kGpu, {1}), "x");
  KernelEntry kernel_ = {.key = "probe/fakegpu", .tag = KernelTag::kProbe, .threads = 1};
};

TEST_F(Launches, PassGridsOfThreeDimensionsAndClusters) {
  gpu_.launch(kCheck, 7, kernel_, {.x = 6, .y = 5, .z = 4, .cluster = 2}, Params{3, 0});
  gpu_.launch(kCheck, 7, kernel_, LaunchGrid{9}, Params{3, 0});
  ASSERT_EQ(fake_state().launches.size(), 2u);
  const LaunchGrid& grid = fake_state().launches[0].whole_grid;
  EXPECT_EQ(grid.x, 6);
  EXPECT_EQ(grid.y, 5);
  EXPECT_EQ(grid.z, 4);
  EXPECT_EQ(grid.cluster, 2);
  const LaunchGrid& line = fake_state().launches[1].whole_grid;
  EXPECT_EQ(line.x, 9);
  EXPECT_EQ(line.y, 1);
  EXPECT_EQ(line.z, 1);
  EXPECT_EQ(line.cluster, 1);
}

TEST_F(Launches, AreNoneWithoutBlocks) {
  for (const LaunchGrid& grid : {LaunchGrid{0}, LaunchGrid{1, 0, 1}, LaunchGrid{1, 1, 0}}) {
    gpu_.launch(kCheck, 0, kernel_, grid, Params{});
  }
  EXPECT_TRUE(fake_state().launches.empty());
}

TEST_F(Launches, RefuseGridsThatNoDeviceTakes) {
  const auto text = [&](const LaunchGrid& grid) {
    return error_of<NotSupportedError>([&] { gpu_.launch(kCheck, 0, kernel_, grid, Params{}); });
  };
  EXPECT_EQ(text({INT64_C(1) << 31}),
            "f: the call needs 2147483648 x 1 x 1 blocks, more than 2147483647 x 65535 x 65535; cut the batch");
  EXPECT_NE(text({1, 65536}).find("1 x 65536 x 1 blocks"), std::string::npos);
  EXPECT_NE(text({1, 1, 65536}).find("1 x 1 x 65536 blocks"), std::string::npos);
  EXPECT_TRUE(fake_state().launches.empty());
}

TEST_F(Launches, LetTheEntryCompleteACopyOfTheParams) {
  kernel_.prepare = make_map;
  const Params params{3, 0};
  gpu_.launch(kCheck, 0, kernel_, LaunchGrid{1}, params);
  ASSERT_EQ(fake_state().launches.size(), 1u);
  ASSERT_EQ(fake_state().launches[0].params.size(), sizeof(Params));
  EXPECT_EQ(fake_state().launches[0].as<Params>().tokens, 3);
  EXPECT_EQ(fake_state().launches[0].as<Params>().map, 103);
  EXPECT_EQ(params.map, 0);
}

TEST_F(Launches, FailWhereTheEntryCannotCompleteThem) {
  kernel_.prepare = make_map;
  EXPECT_EQ(error_of<BackendError>([&] { gpu_.launch(kCheck, 0, kernel_, LaunchGrid{1}, Params{-1, 0}); }),
            "f: cuda:0: no map of fewer than 0 tokens");
  EXPECT_TRUE(fake_state().launches.empty());
}

}  // namespace
}  // namespace flashport::test
