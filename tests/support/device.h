// The device under test: what the command line asked for, and its memory through the backend's own table of functions.
// --target=<cpu|cpu_generic|cpu_avx2|cpu_avx512|cpu_vnni|cpu_amx|sm90a|gfx942|gfx950|gfx11> picks it;
// --tier=<emulator|full> picks the size of cases.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include <flashport/types.h>

#include "common/host/backend_abi.h"

namespace flashport_test {

struct Options {
  std::string target = "cpu";
  bool emulator = false;  // the tier
};

// Set by main before any test runs.
const Options& options();
// Reads and removes our arguments; opens the device. Returns what the program has to end with, 0 when all is well, and
// prints which device it is or what is wrong.
int start(int* argc, char** argv);

flashport::Device device();
const flashport::BackendAbi& backend();
// The name that supports() and which_kernel() take: "cpu" for all CPU targets.
std::string query_target();
// Waits for the default stream.
void synchronize();

// Device memory between two guard zones, whole storage filled with a poison byte pattern.
class DeviceBuffer {
 public:
  explicit DeviceBuffer(std::size_t bytes);
  ~DeviceBuffer();
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;
  DeviceBuffer(DeviceBuffer&& other) noexcept;
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept;

  [[nodiscard]] void* data() const;
  [[nodiscard]] std::size_t size() const { return bytes_; }
  void write(const void* from) const;
  void read(void* to) const;
  // Whether the guard zones are as they were.
  [[nodiscard]] bool guards_intact() const;

 private:
  std::size_t bytes_;
  void* memory_ = nullptr;
};

}  // namespace flashport_test
