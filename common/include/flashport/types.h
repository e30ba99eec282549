// Vendor-free value types of the public interface: element types, devices, non-owning tensor views.
// Shapes and strides are int64 and count elements, never bytes. A view owns nothing.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>

#include <flashport/export.h>

namespace flashport {

enum class DType : std::int32_t {
  kFloat32,
  kFloat16,
  kBFloat16,
  kFp8E4M3,      // OCP e4m3 (finite, one NaN), as NVIDIA, gfx950 and gfx12 have it
  kFp8E4M3Fnuz,  // FNUZ e4m3, as gfx942 has it; gfx950 widens it too
  kInt32,
  kInt64,
  kUInt32,
  kUInt8,  // the carrier of blocks: a cache of it says by name which format they have (KvFormat)
  kInt8,   // of a cache alone, like the next
  kFp8E5M2,

  // No argument may have these: refusals name them.
  kFloat64,
  kInt16,
  kBool,
};

// Bytes of one element. Every DType has a fixed size.
[[nodiscard]] constexpr int element_size(DType type) {
  switch (type) {
    case DType::kFloat64:
    case DType::kInt64: return 8;
    case DType::kFloat32:
    case DType::kInt32:
    case DType::kUInt32: return 4;
    case DType::kFloat16:
    case DType::kBFloat16:
    case DType::kInt16: return 2;
    case DType::kFp8E4M3:
    case DType::kFp8E4M3Fnuz:
    case DType::kFp8E5M2:
    case DType::kUInt8:
    case DType::kInt8:
    case DType::kBool: return 1;
  }
  return 0;
}

// Lower-case name as messages, kernel keys and the Python package spell it: "bfloat16", "float8_e4m3fn", ...
[[nodiscard]] FLASHPORT_API const char* dtype_name(DType type);

// How a cache stores keys or values. Most formats are an element type's own, and tensors of that type need no other
// word; blocks of ggml come as bytes: a q8_0 row of D values is D / 32 * 34 elements of kUInt8. kInt4 has two signed
// values in each element of kInt8, the first in the low bits. Scales of kInt8 and kInt4, and of fp8 where it has them,
// are a tensor of their own: one for a row, or for each group of 8 values of it or a multiple of 8, as LightLLM has
// them.
enum class KvFormat : std::int32_t {
  kFp32,
  kFp16,
  kBf16,
  kFp8E4M3,
  kFp8E4M3Fnuz,
  kQ8_0,
  kQ4_0,
  kQ4_1,
  kQ5_0,
  kQ5_1,
  kIq4Nl,
  kFp8E5M2,
  kInt8,
  kInt4,

  kAny = 255,  // no cache's: kernels that widen whatever format a row has say it
};

// "fp32", "fp16", "bf16", "fp8_e4m3", "fp8_e4m3fnuz", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl",
// "fp8_e5m2", "int8", "int4": as messages, kernel keys and the Python package spell it.
[[nodiscard]] FLASHPORT_API const char* kv_format_name(KvFormat format);

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
