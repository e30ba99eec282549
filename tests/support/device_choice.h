// Which device of a backend a test program runs on: the first that its target serves, wherever it is among others.
#pragma once

#include <string>

#include "common/host/backend_abi.h"

namespace flashport_test {

// What a test program returns where no device of its target is; CTest takes it for a test that was skipped.
inline constexpr int kNoDevice = 77;

struct DeviceChoice {
  int index = -1;
  std::string text;   // which device it is, or why there is none
  int exit_code = 0;  // without a device: kNoDevice, or 2 where one may be there but cannot be used
};

[[nodiscard]] DeviceChoice choose_device(const flashport::BackendAbi& backend, const std::string& target);

}  // namespace flashport_test
