// Backends for tests of the host side: host memory plays the device's, launches are recorded, and the kernel tables
// hold what a GPU and a CPU target have, without any code.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "common/device/decode/params.h"
#include "common/host/backend_abi.h"

namespace flashport::test {

struct Launch {
  std::string key;
  std::int64_t grid = 0;  // blocks along x, as most launches have no others
  Stream stream = 0;
  std::vector<unsigned char> params;
  LaunchGrid whole_grid = {};

  template <class Params>
  [[nodiscard]] Params as() const {
    Params copy{};
    std::memcpy(&copy, params.data(), sizeof(Params));
    return copy;
  }
};

// What the fake devices answer and what they were asked.
struct FakeState {
  std::vector<Launch> launches;
  std::uint64_t capture = 0;  // capture_id of every stream
  int multiprocessors = 10;
  int occupancy = 2;
  int allocations = 0;
  int live_allocations = 0;
  bool fail_allocations = false;
};
FakeState& fake_state();

// Replaces all three backends by fake ones for its lifetime: "cpu", "cuda" with the target "fakegpu", and none for
// HIP but a device without a target.
class FakeBackends {
 public:
  FakeBackends();
  ~FakeBackends();
  FakeBackends(const FakeBackends&) = delete;
  FakeBackends& operator=(const FakeBackends&) = delete;
};

inline constexpr Device kGpu{DeviceKind::kCuda, 0};
inline constexpr Device kUnserved{DeviceKind::kHip, 0};

}  // namespace flashport::test
