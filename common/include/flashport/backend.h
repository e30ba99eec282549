// What is installed and what is there: the backends of this process and their devices.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <flashport/export.h>
#include <flashport/types.h>

namespace flashport {

struct DeviceProperties {
  Device device;
  std::string name;         // the vendor's name of the card
  std::string target;       // which of our targets serves it: "cpu", "sm90a", "gfx942", ...; empty if none does
  int multiprocessors = 0;  // SMs, CUs, or hardware threads
  std::int64_t memory_bytes = 0;
};

struct BackendStatus {
  std::string name;  // "cpu", "cuda", "hip"
  bool available = false;
  std::string detail;                // why it is not available, or the file it was opened from
  std::vector<std::string> targets;  // compiled into it
  std::vector<DeviceProperties> devices;
};

// Every backend that this build knows of, also those that could not be opened and why.
[[nodiscard]] FLASHPORT_API std::vector<BackendStatus> backends();

// Keys of all kernels that a target has, in table order.
[[nodiscard]] FLASHPORT_API std::vector<std::string> kernel_keys(const std::string& target);

// Limits the multiprocessors that schedules count on, for tests of schedule invariance; 0 restores the device's own.
FLASHPORT_API void set_multiprocessor_limit(int count);

// The version of this library, "major.minor.patch".
[[nodiscard]] FLASHPORT_API const char* version();

}  // namespace flashport
