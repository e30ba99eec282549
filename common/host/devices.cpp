#include "common/host/devices.h"

#include <array>
#include <cstddef>
#include <cstring>
#include <mutex>
#include <string_view>
#include <vector>

#include <flashport/backend.h>

#include "common/host/loader.h"

namespace flashport {
namespace {

constexpr int kKinds = 3;
constexpr int kMaxDevices = 64;

std::atomic<int> limit_for_tests = 0;  // 0: none
std::mutex contexts_mutex;
std::atomic<DeviceContext*> contexts[kKinds][kMaxDevices];

std::string device_error(const LoadedBackend& backend, int index, BackendDevice* info) {
  int count = 0;
  if (const char* error = backend.abi->device_count(&count)) return error;
  if (index >= count) return "there are " + std::to_string(count) + " devices";
  const char* error = backend.abi->device_info(index, info);
  return error == nullptr ? "" : error;
}

std::string compiled_targets(const BackendAbi& abi) {
  std::string text;
  for (const char* const* target = abi.targets; *target != nullptr; ++target) {
    text += (text.empty() ? "" : ", ") + std::string(*target);
  }
  return text;
}

// Never destroyed: a call may run while the process ends.
DeviceContext& create_context(const Check& check, Device device, const char* name) {
  const std::lock_guard lock(contexts_mutex);
  auto& entry = contexts[static_cast<int>(device.kind)][device.index];
  if (DeviceContext* existing = entry.load(std::memory_order_acquire)) return *existing;
  const LoadedBackend& backend = load_backend(device.kind);
  const std::string where = std::string(name) + " is on " + device_name(device);
  if (backend.abi == nullptr) check.not_supported(where + ", and " + backend.detail);
  BackendDevice info{};
  if (const std::string error = device_error(backend, device.index, &info); !error.empty()) {
    check.backend_error(where + ", which cannot be used: " + error);
  }
  if (info.target[0] == '\0') {
    check.not_supported(where + " (" + info.name + ", " + info.architecture +
                        "), which none of the compiled targets (" + compiled_targets(*backend.abi) + ") serves");
  }
  auto* context = new DeviceContext(backend.abi, device, info);
  entry.store(context, std::memory_order_release);
  return *context;
}

std::span<const KernelEntry> kernels_of(const BackendAbi& abi, const char* target) {
  int count = 0;
  const KernelEntry* entries = abi.kernels(target, &count);
  return entries == nullptr ? std::span<const KernelEntry>() : std::span(entries, static_cast<std::size_t>(count));
}

// The target of a backend's first device; empty if it has none.
std::string first_target(DeviceKind kind) {
  const LoadedBackend& backend = load_backend(kind);
  BackendDevice info{};
  if (backend.abi == nullptr || !device_error(backend, 0, &info).empty()) return "";
  return info.target;
}

std::string missing_kernel_text(const TargetView& target, KernelTag tag) {
  return target.name + " was built without the kernel " + kernel_tag_name(tag);
}

}  // namespace

DeviceContext::DeviceContext(const BackendAbi* abi, Device device, const BackendDevice& info)
    : abi_(abi),
      device_(device),
      target_{info.target, device.kind, kernels_of(*abi, info.target)},
      multiprocessors_(info.multiprocessors < 1 ? 1 : info.multiprocessors),
      occupancy_(new std::atomic<int>[target_.kernels.size()]()) {
  for (const KernelEntry& kernel : target_.kernels) plain_kernels_[static_cast<std::size_t>(kernel.tag)] = &kernel;
}

int DeviceContext::multiprocessors() const {
  const int limit = multiprocessor_limit();
  return limit > 0 ? limit : multiprocessors_;
}

const KernelEntry& DeviceContext::plain_kernel(const Check& check, KernelTag tag) const {
  const KernelEntry* kernel = plain_kernels_[static_cast<std::size_t>(tag)];
  if (kernel == nullptr) check.not_supported(missing_kernel_text(target_, tag));
  return *kernel;
}

const KernelEntry* find_plain_kernel(const TargetView& target, KernelTag tag, std::string& reason) {
  for (const KernelEntry& kernel : target.kernels) {
    if (kernel.tag == tag) return &kernel;
  }
  reason = missing_kernel_text(target, tag);
  return nullptr;
}

int DeviceContext::occupancy(const Check& check, const KernelEntry& kernel) {
  std::atomic<int>& known = occupancy_[static_cast<std::size_t>(&kernel - target_.kernels.data())];
  int blocks = known.load(std::memory_order_relaxed);
  if (blocks > 0) return blocks;
  expect(check, abi_->occupancy(device_.index, &kernel, &blocks));
  if (blocks < 1) check.backend_error(std::string(kernel.key) + " does not fit on " + device_name(device_));
  known.store(blocks, std::memory_order_relaxed);
  return blocks;
}

void DeviceContext::launch(const Check& check, Stream stream, const KernelEntry& kernel, const LaunchGrid& grid,
                           const void* params, std::size_t bytes) {
  constexpr std::int64_t kMaxGrid = 0x7fffffff, kMaxSide = 0xffff;
  if (grid.x > kMaxGrid || grid.y > kMaxSide || grid.z > kMaxSide) {
    check.not_supported("the call needs " + std::to_string(grid.x) + " x " + std::to_string(grid.y) + " x " +
                        std::to_string(grid.z) + " blocks, more than " + std::to_string(kMaxGrid) + " x " +
                        std::to_string(kMaxSide) + " x " + std::to_string(kMaxSide) + "; cut the batch");
  }
  if (grid.is_empty()) return;
  alignas(64) std::array<std::byte, kMostParamsBytes> own;
  if (kernel.prepare != nullptr) {
    std::memcpy(own.data(), params, bytes);
    expect(check, kernel.prepare(own.data()));
    params = own.data();
  }
  expect(check, abi_->launch(device_.index, stream, &kernel, grid, params, bytes));
}

void DeviceContext::expect(const Check& check, const char* error) const {
  if (error != nullptr) check.backend_error(device_name(device_) + ": " + error);
}

DeviceContext& device_context(const Check& check, const TensorView& tensor, const char* name) {
  const Device device = tensor.device;
  const int kind = static_cast<int>(device.kind);
  if (kind < 0 || kind >= kKinds || device.index < 0 || device.index >= kMaxDevices) {
    check.value_error(std::string(name) + " must be on a device of index 0 to " + std::to_string(kMaxDevices - 1) +
                      ", got " + device_name(device));
  }
  DeviceContext* known = contexts[kind][device.index].load(std::memory_order_acquire);
  return known != nullptr ? *known : create_context(check, device, name);
}

TargetView find_target(const std::string& name, std::string& reason) {
  std::string target = name;
  if (target.empty()) {
    target = first_target(DeviceKind::kHip);
    if (target.empty()) target = first_target(DeviceKind::kCuda);
    if (target.empty()) target = "cpu";
  }
  std::string looked;
  for (DeviceKind kind : kAllKinds) {
    const LoadedBackend& backend = load_backend(kind);
    const bool whole_backend = target == backend_name(kind);
    if (backend.abi == nullptr) {
      if (whole_backend) {
        reason = backend.detail;
        return {};
      }
      looked += "; " + backend.detail;
      continue;
    }
    if (whole_backend) {
      BackendDevice info{};
      if (const std::string error = device_error(backend, 0, &info); !error.empty()) {
        reason = target + " has no device that can be used: " + error;
      } else if (info.target[0] == '\0') {
        reason = std::string(info.name) + " (" + info.architecture + ") is served by none of the compiled targets (" +
                 compiled_targets(*backend.abi) + ")";
      } else {
        return {info.target, kind, kernels_of(*backend.abi, info.target)};
      }
      return {};
    }
    const auto kernels = kernels_of(*backend.abi, target.c_str());
    if (!kernels.empty()) return {target, kind, kernels};
    looked += std::string("; ") + backend_name(kind) + " has " + compiled_targets(*backend.abi);
  }
  reason = "no target \"" + target + "\" is compiled into this installation" + looked;
  return {};
}

DeviceContext& find_device(const Check& check, const TargetView& target) {
  const BackendAbi& abi = *load_backend(target.kind).abi;
  int count = 0;
  if (const char* error = abi.device_count(&count)) check.backend_error(error);
  for (int index = 0; index < count && index < kMaxDevices; ++index) {
    BackendDevice info{};
    if (abi.device_info(index, &info) != nullptr || target.name != info.target) continue;
    return device_context(check, TensorView(nullptr, DType::kFloat32, {target.kind, index}, {0}), "the call");
  }
  check.not_supported("no device of target " + target.name + " is here");
}

void forget_devices() {
  const std::lock_guard lock(contexts_mutex);
  for (auto& kind : contexts) {
    for (auto& entry : kind) delete entry.exchange(nullptr);
  }
}

void set_multiprocessor_limit(int count) {
  if (count < 0)
    throw ValueError("set_multiprocessor_limit: count must be 0 (no limit) or more, got " + std::to_string(count));
  limit_for_tests.store(count, std::memory_order_relaxed);
}

int multiprocessor_limit() { return limit_for_tests.load(std::memory_order_relaxed); }

std::vector<std::string> kernel_keys(const std::string& target) {
  std::vector<std::string> keys;
  std::string reason;
  const TargetView found = find_target(target, reason);
  if (!reason.empty()) throw NotSupportedError("kernel_keys: " + reason);
  for (const KernelEntry& kernel : found.kernels) keys.emplace_back(kernel.key);
  return keys;
}

std::vector<BackendStatus> backends() {
  std::vector<BackendStatus> all;
  for (DeviceKind kind : kAllKinds) {
    const LoadedBackend& backend = load_backend(kind);
    BackendStatus status;
    status.name = backend_name(kind);
    status.detail = backend.detail;
    if (backend.abi != nullptr) {
      for (const char* const* target = backend.abi->targets; *target != nullptr; ++target) {
        status.targets.emplace_back(*target);
      }
      int count = 0;
      const char* error = backend.abi->device_count(&count);
      if (error != nullptr) status.detail += ": " + std::string(error);
      if (error == nullptr && count == 0) status.detail += ": no device in sight";
      for (int index = 0; error == nullptr && index < count; ++index) {
        BackendDevice info{};
        if (const char* why = backend.abi->device_info(index, &info)) {
          status.detail += "; device " + std::to_string(index) + ": " + why;
          continue;
        }
        DeviceProperties device;
        device.device = {kind, index};
        device.name = info.name;
        device.target = info.target;
        device.multiprocessors = info.multiprocessors;
        device.memory_bytes = info.memory_bytes;
        status.devices.push_back(device);
        status.available = status.available || !device.target.empty();
      }
      if (!status.devices.empty() && !status.available) {
        status.detail += ": none of its targets serves " + status.devices.front().name;
      }
    }
    all.push_back(status);
  }
  return all;
}

}  // namespace flashport
