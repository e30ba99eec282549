// What is known of the types of arrays: whose they are, how they are exported, and DLPack's element types and devices
// as the library's.
#pragma once

#include <Python.h>

#include <optional>
#include <string>

#include <flashport/types.h>

#include "bindings/python/dlpack_abi.h"

namespace flashport::python {

enum class Library { kOther, kNumpy, kTorch, kCupy, kJax, kFlashport };  // kTorch: a tensor

// What is known of an array type; looked up once per type.
struct TypeInfo {
  Library library = Library::kOther;
  const dlpack::ExchangeApi* exchange = nullptr;  // null: through __dlpack__
  bool versioned = true;                          // __dlpack__ takes max_version
  bool is_masked = false;                         // NumPy's MaskedArray, whose mask DLPack leaves out
  bool stands_for_others = false;                 // a tensor whose operators run code of Python, such as a fake one
};
const TypeInfo& type_info(PyTypeObject* type);

// The element type that a DLPack type stands for; nullopt if the library has none.
std::optional<DType> dtype_from_dlpack(dlpack::DataType type);
dlpack::DataType dtype_to_dlpack(DType type);
dlpack::Device device_to_dlpack(Device device);
// nullopt of memory that no backend reads.
inline std::optional<Device> device_from_dlpack(dlpack::Device device) {
  switch (device.type) {
    case dlpack::kCpu:
    case dlpack::kCudaHost:
    case dlpack::kRocmHost: return Device{};
    case dlpack::kCuda:
    case dlpack::kCudaManaged: return Device{DeviceKind::kCuda, device.index};
    case dlpack::kRocm: return Device{DeviceKind::kHip, device.index};
    default: return std::nullopt;
  }
}
// As error texts spell it: "int16", "float8_e4m3fn".
std::string dlpack_type_name(dlpack::DataType type);

}  // namespace flashport::python
