// Devices as the dispatch of a call sees them: the backend, the kernels of the device's target, and what is cached of
// them, so that a call asks the driver for nothing but its launch.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "common/host/backend_abi.h"
#include "common/host/check.h"

namespace flashport {

struct TargetView {
  std::string name;
  DeviceKind kind = DeviceKind::kCpu;
  std::span<const KernelEntry> kernels;
};

class DeviceContext {
 public:
  DeviceContext(const BackendAbi* abi, Device device, const BackendDevice& info);

  [[nodiscard]] Device device() const { return device_; }
  [[nodiscard]] const BackendAbi& abi() const { return *abi_; }
  [[nodiscard]] const TargetView& target_view() const { return target_; }
  [[nodiscard]] const std::string& target() const { return target_.name; }
  [[nodiscard]] std::span<const KernelEntry> kernels() const { return target_.kernels; }
  // The count that schedules are cut for: the device's own, or the limit set for tests.
  [[nodiscard]] int multiprocessors() const;
  [[nodiscard]] bool is_cpu() const { return device_.kind == DeviceKind::kCpu; }

  [[nodiscard]] bool has_kernel(KernelTag tag) const {
    return plain_kernels_[static_cast<std::size_t>(tag)] != nullptr;
  }
  // The kernel of an operation without a template shape, of which a target has one.
  [[nodiscard]] const KernelEntry& plain_kernel(const Check& check, KernelTag tag) const;

  [[nodiscard]] int occupancy(const Check& check, const KernelEntry& kernel);

  template <class Params>
  void launch(const Check& check, Stream stream, const KernelEntry& kernel, const LaunchGrid& grid,
              const Params& params) {
    static_assert(sizeof(Params) <= kMostParamsBytes);
    launch(check, stream, kernel, grid, &params, sizeof(Params));
  }

  // Throws BackendError for an error text of the backend; null is no error.
  void expect(const Check& check, const char* error) const;

 private:
  void launch(const Check& check, Stream stream, const KernelEntry& kernel, const LaunchGrid& grid, const void* params,
              std::size_t bytes);

  const BackendAbi* abi_;
  Device device_;
  TargetView target_;
  int multiprocessors_;
  std::array<const KernelEntry*, kKernelTags> plain_kernels_ = {};  // by tag; null: the target has none
  std::unique_ptr<std::atomic<int>[]> occupancy_;                   // by kernel; 0: not asked yet
};

// The device that `tensor` lies on. Throws NotSupportedError where no backend or target serves it.
[[nodiscard]] DeviceContext& device_context(const Check& check, const TensorView& tensor, const char* name);

// The kernels of a target: a compiled target's name, or "cpu", "cuda", "hip" for that of the first device, or "" for
// that of the first GPU, else of the CPU. Sets `reason` where there are none.
[[nodiscard]] TargetView find_target(const std::string& name, std::string& reason);

// The first device of a target. Throws NotSupportedError where there is none.
[[nodiscard]] DeviceContext& find_device(const Check& check, const TargetView& target);

// The kernel of an operation without a template shape. Null, and the reason, where the target has none.
[[nodiscard]] const KernelEntry* find_plain_kernel(const TargetView& target, KernelTag tag, std::string& reason);

// What tests have limited the multiprocessors to; 0: nothing.
[[nodiscard]] int multiprocessor_limit();

// Devices are looked up again at their next use. No other call may run meanwhile.
void forget_devices();

}  // namespace flashport
