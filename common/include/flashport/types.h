// Vendor-free value types of the public interface: devices, non-owning tensor views. Element types are in enums.h.
// Shapes and strides are int64 and count elements, never bytes. A view owns nothing.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>

#include <flashport/enums.h>
#include <flashport/export.h>

namespace flashport {

enum class DeviceKind : std::int32_t { kCpu, kCuda, kHip };

struct Device {
  DeviceKind kind = DeviceKind::kCpu;
  int index = 0;
  friend bool operator==(const Device&, const Device&) = default;
};

// "cpu", "cuda:0", "hip:1"
[[nodiscard]] FLASHPORT_API std::string device_name(Device device);

// A stream handle of the tensors' device (cudaStream_t, hipStream_t); 0 is the default stream; ignored on the CPU.
using Stream = std::uintptr_t;

inline constexpr int kMaxRank = 8;

// A strided, non-owning view of a tensor. `data` already includes any byte offset.
struct TensorView {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  Device device;
  int rank = 0;
  std::int64_t shape[kMaxRank] = {};
  std::int64_t strides[kMaxRank] = {};
  bool read_only = false;

  TensorView() = default;
  // A contiguous (row-major) view.
  TensorView(void* pointer, DType type, Device where, std::initializer_list<std::int64_t> extents)
      : data(pointer), dtype(type), device(where), rank(static_cast<int>(extents.size())) {
    int axis = 0;
    for (std::int64_t extent : extents) shape[axis++] = extent;
    std::int64_t step = 1;
    for (axis = rank - 1; axis >= 0; --axis) {
      strides[axis] = step;
      step *= shape[axis];
    }
  }

  [[nodiscard]] std::int64_t numel() const {
    std::int64_t count = 1;
    for (int axis = 0; axis < rank; ++axis) count *= shape[axis];
    return count;
  }
};

// How the keys of a call are cut into pieces that run side by side.
//   kInvariant  as each sequence's own lengths say: bits do not depend on the batch or the device's size
//   0           num_splits_heuristic picks the count
//   n > 0       n equal splits
inline constexpr int kInvariantSplits = -1;

// Whether a request is served.
struct Support {
  bool supported = false;
  std::string reason;  // why not; empty when supported
};

}  // namespace flashport
