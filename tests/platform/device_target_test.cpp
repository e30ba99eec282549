// Which target serves which device: pure functions, so they are tested for devices that are not here.
#include <gtest/gtest.h>

#include "cpu/runtime/device_target.h"
#include "cuda/runtime/device_target.h"
#include "hip/runtime/device_target.h"

namespace flashport {
namespace {

TEST(DeviceTarget, Cuda) {
  EXPECT_STREQ(cuda_runtime::target_of(9, 0), "sm90a");
  for (const auto& [major, minor] : {std::pair{7, 5}, {8, 0}, {8, 9}, {10, 0}, {12, 0}}) {
    EXPECT_STREQ(cuda_runtime::target_of(major, minor), "") << major << "." << minor;
  }
  EXPECT_EQ(cuda_runtime::architecture_name(9, 0), "sm_90");
  EXPECT_EQ(cuda_runtime::architecture_name(12, 1), "sm_121");
}

TEST(DeviceTarget, Hip) {
  EXPECT_EQ(hip_runtime::target_of("gfx942:sramecc+:xnack-"), "gfx942");
  EXPECT_EQ(hip_runtime::target_of("gfx942"), "gfx942");
  EXPECT_EQ(hip_runtime::target_of("gfx950:sramecc+:xnack-"), "gfx950");
  for (const char* rdna3 : {"gfx1100", "gfx1101", "gfx1102", "gfx1103", "gfx1150", "gfx1151", "gfx1152", "gfx1153"}) {
    EXPECT_EQ(hip_runtime::target_of(rdna3), "gfx11") << rdna3;
  }
  for (const char* other : {"", "gfx90a:sramecc+:xnack-", "gfx1030", "gfx110", "gfx11000", "gfx1201", "gfx9420"}) {
    EXPECT_EQ(hip_runtime::target_of(other), "") << other;
  }
}

TEST(DeviceTarget, OldestHip) {
  EXPECT_EQ(hip_runtime::hip_version_text(hip_runtime::oldest_hip("gfx942")), "HIP 6.2");
  EXPECT_EQ(hip_runtime::hip_version_text(hip_runtime::oldest_hip("gfx950")), "HIP 6.2");
  EXPECT_EQ(hip_runtime::hip_version_text(hip_runtime::oldest_hip("gfx11")), "HIP 6.3");
  EXPECT_EQ(hip_runtime::hip_version_text(70253211), "HIP 7.2");
}

TEST(DeviceTarget, Cpu) {
  const TargetKernels generic = {"cpu_generic", nullptr, 0};
  const TargetKernels impossible = {"cpu_of_tomorrow", nullptr, 0};
  const TargetKernels tables[] = {generic, impossible};
  std::string error;
  for (const char* forced : {static_cast<const char*>(nullptr), "", "cpu", "cpu_generic"}) {
    const TargetKernels* chosen = cpu_runtime::choose_target(tables, forced, error);
    ASSERT_NE(chosen, nullptr);
    EXPECT_STREQ(chosen->target, "cpu_generic");
    EXPECT_EQ(error, "");
  }
  for (const char* forced : {"cpu_of_tomorrow", "cpu_avx1024", "generic"}) {
    error.clear();
    EXPECT_EQ(cpu_runtime::choose_target(tables, forced, error), nullptr);
    EXPECT_EQ(error,
              "FLASHPORT_CPU_TARGET must be cpu (the best) or a target that is compiled and runs on this processor "
              "(cpu_generic), got \"" +
                  std::string(forced) + "\"");
  }
  error.clear();
  for (const char* forced : {static_cast<const char*>(nullptr), "cpu_generic"}) {
    EXPECT_EQ(cpu_runtime::choose_target(std::span(&impossible, 1), forced, error), nullptr);
    EXPECT_EQ(error,
              "no compiled CPU target (cpu_of_tomorrow) runs on this processor: build with FLASHPORT_TARGETS=cpu");
  }
}

}  // namespace
}  // namespace flashport
