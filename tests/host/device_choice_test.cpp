// Which device a test program takes, on machines that have several, or none of its target's, or a broken one.
#include "tests/support/device_choice.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

namespace flashport_test {
namespace {

using flashport::BackendAbi;
using flashport::BackendDevice;

struct FakeDevice {
  const char *architecture, *target;
  const char* error = nullptr;
};
std::vector<FakeDevice> g_devices;
const char* g_count_error = nullptr;

const char* device_count(int* count) {
  *count = static_cast<int>(g_devices.size());
  return g_count_error;
}
const char* device_info(int device, BackendDevice* info) {
  const FakeDevice& fake = g_devices[static_cast<std::size_t>(device)];
  std::strcpy(info->name, "Card");
  std::strcpy(info->architecture, fake.architecture);
  std::strcpy(info->target, fake.target);
  return fake.error;
}

DeviceChoice choose(std::vector<FakeDevice> devices, const char* count_error = nullptr) {
  g_devices = std::move(devices);
  g_count_error = count_error;
  BackendAbi abi{};
  abi.name = "hip";
  abi.device_count = device_count;
  abi.device_info = device_info;
  return choose_device(abi, "gfx942");
}

TEST(DeviceChoice, TakesTheFirstDeviceOfItsTarget) {
  const DeviceChoice choice =
      choose({{"gfx1100", "gfx11"}, {"gfx90a", ""}, {"gfx942", "gfx942"}, {"gfx942", "gfx942"}});
  EXPECT_EQ(choice.index, 2);
  EXPECT_EQ(choice.exit_code, 0);
  EXPECT_EQ(choice.text, "gfx942 runs on hip:2 (Card, gfx942)");
}

TEST(DeviceChoice, IsSkippedWhereNoDeviceIsOfItsTarget) {
  DeviceChoice choice = choose({{"gfx1100", "gfx11"}, {"gfx90a", ""}});
  EXPECT_EQ(choice.index, -1);
  EXPECT_EQ(choice.exit_code, kNoDevice);
  EXPECT_EQ(choice.text, "no device of target gfx942: hip:0 is Card, gfx1100; hip:1 is Card, gfx90a");
  choice = choose({});
  EXPECT_EQ(choice.exit_code, kNoDevice);
  EXPECT_EQ(choice.text, "no device of target gfx942: hip sees no device");
  choice = choose({}, "no HIP runtime");
  EXPECT_EQ(choice.index, -1);
  EXPECT_EQ(choice.exit_code, kNoDevice);
  EXPECT_EQ(choice.text, "no device of target gfx942: no HIP runtime");
}

TEST(DeviceChoice, FailsWhereItsDeviceMayBeOneThatCannotBeUsed) {
  const FakeDevice broken = {"gfx942", "", "the runtime is too old"};
  DeviceChoice choice = choose({{"gfx1100", "gfx11"}, broken});
  EXPECT_EQ(choice.index, -1);
  EXPECT_EQ(choice.exit_code, 2);
  EXPECT_EQ(choice.text, "no device of target gfx942: hip:1 cannot be used: the runtime is too old");
  choice = choose({broken, {"gfx942", "gfx942"}});
  EXPECT_EQ(choice.index, 1);
  EXPECT_EQ(choice.exit_code, 0);
}

}  // namespace
}  // namespace flashport_test
