#include "tests/support/device.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <utility>

#include <flashport/backend.h>

#include "common/host/loader.h"
#include "tests/support/device_choice.h"

namespace flashport_test {
namespace {

constexpr std::size_t kGuardBytes = 256;  // keeps the alignment that vector loads want
constexpr unsigned char kGuard = 0xa5;

Options g_options;
flashport::Device g_device;

void check(const char* error) {
  if (error != nullptr) throw std::runtime_error(error);
}

int fail(const std::string& text, int code) {
  std::fprintf(stderr, "%s\n", text.c_str());
  return code;
}

}  // namespace

const Options& options() { return g_options; }
flashport::Device device() { return g_device; }

const flashport::BackendAbi& backend() {
  const flashport::BackendAbi* found = flashport::load_backend(g_device.kind).abi;
  if (found == nullptr)
    throw std::runtime_error("the backend of " + flashport::device_name(g_device) + " is not there");
  return *found;
}

std::string query_target() { return g_options.target.starts_with("cpu") ? "cpu" : g_options.target; }

void synchronize() { check(backend().synchronize(g_device.index, 0)); }

int start(int* argc, char** argv) {
  int kept = 1;
  for (int i = 1; i < *argc; ++i) {
    const std::string argument = argv[i];
    if (argument.starts_with("--target=")) {
      g_options.target = argument.substr(9);
    } else if (argument.starts_with("--tier=")) {
      const std::string tier = argument.substr(7);
      if (tier != "emulator" && tier != "full") return fail("--tier must be emulator or full, got " + tier, 2);
      g_options.emulator = tier == "emulator";
    } else {
      argv[kept++] = argv[i];
    }
  }
  *argc = kept;
  if (g_options.target.starts_with("cpu")) {
    // Read by the CPU backend when it is first asked for its targets.
    if (g_options.target != "cpu") setenv("FLASHPORT_CPU_TARGET", g_options.target.c_str(), 1);
    int count = 0;
    const char* error = backend().device_count(&count);
    if (error == nullptr) return 0;
    const auto is_target = [](const char* name) { return g_options.target == name; };
    const char* const* end = backend().targets;
    while (*end != nullptr) ++end;
    return fail(error, std::any_of(backend().targets, end, is_target) ? kNoDevice : 2);
  }
  std::string looked;
  for (const flashport::BackendStatus& status : flashport::backends()) {
    if (std::ranges::find(status.targets, g_options.target) == status.targets.end()) {
      looked += " " + status.name + ": " + status.detail + ";";
      continue;
    }
    g_device.kind = status.name == "hip" ? flashport::DeviceKind::kHip : flashport::DeviceKind::kCuda;
    const DeviceChoice choice = choose_device(backend(), g_options.target);
    if (choice.index < 0) return fail(choice.text, choice.exit_code);
    g_device.index = choice.index;
    std::printf("%s\n", choice.text.c_str());
    // An emulated device has hundreds of multiprocessors and no time: three blocks' worth cut the work enough.
    if (g_options.emulator) flashport::set_multiprocessor_limit(3);
    return 0;
  }
  return fail("no backend has the target " + g_options.target + ":" + looked, 2);
}

DeviceBuffer::DeviceBuffer(std::size_t bytes) : bytes_(bytes) {
  check(backend().allocate(g_device.index, bytes + 2 * kGuardBytes, &memory_));
  const std::vector<unsigned char> poison(bytes + 2 * kGuardBytes, kGuard);
  check(backend().copy(g_device.index, 0, memory_, poison.data(), poison.size()));
  synchronize();
}

DeviceBuffer::~DeviceBuffer() {
  if (memory_ != nullptr) backend().release(g_device.index, memory_);
}

DeviceBuffer::DeviceBuffer(DeviceBuffer&& other) noexcept
    : bytes_(other.bytes_), memory_(std::exchange(other.memory_, nullptr)) {}

DeviceBuffer& DeviceBuffer::operator=(DeviceBuffer&& other) noexcept {
  std::swap(bytes_, other.bytes_);
  std::swap(memory_, other.memory_);
  return *this;
}

void* DeviceBuffer::data() const { return static_cast<unsigned char*>(memory_) + kGuardBytes; }

void DeviceBuffer::write(const void* from) const {
  if (bytes_ == 0) return;
  check(backend().copy(g_device.index, 0, data(), from, bytes_));
  synchronize();
}

void DeviceBuffer::read(void* to) const {
  synchronize();
  if (bytes_ == 0) return;
  check(backend().copy(g_device.index, 0, to, data(), bytes_));
  synchronize();
}

bool DeviceBuffer::guards_intact() const {
  std::vector<unsigned char> all(bytes_ + 2 * kGuardBytes);
  check(backend().copy(g_device.index, 0, all.data(), memory_, all.size()));
  synchronize();
  for (std::size_t i = 0; i < kGuardBytes; ++i) {
    if (all[i] != kGuard || all[kGuardBytes + bytes_ + i] != kGuard) return false;
  }
  return true;
}

}  // namespace flashport_test
