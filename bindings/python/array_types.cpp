#include "bindings/python/array_types.h"

#include <pybind11/pybind11.h>

#include <iterator>
#include <string>
#include <string_view>
#include <unordered_map>

#include "bindings/python/arguments.h"
#include "bindings/python/device_array.h"
#include "bindings/python/torch_tensors.h"

namespace flashport::python {
namespace {

const dlpack::ExchangeApi* find_exchange_api(PyTypeObject* type) {
  for (const char* name : {"__dlpack_c_exchange_api__", "__c_dlpack_exchange_api__"}) {
    const py::object value = attribute_or_null(reinterpret_cast<PyObject*>(type), name);
    if (!value) continue;
    void* pointer = nullptr;
    if (PyCapsule_IsValid(value.ptr(), "dlpack_exchange_api") != 0) {
      pointer = PyCapsule_GetPointer(value.ptr(), "dlpack_exchange_api");
    } else if (PyLong_Check(value.ptr())) {
      pointer = PyLong_AsVoidPtr(value.ptr());
    }
    PyErr_Clear();
    auto* header = static_cast<dlpack::ExchangeApiHeader*>(pointer);
    while (header != nullptr && header->version.major != dlpack::kMajorVersion) header = header->previous;
    if (header != nullptr) return reinterpret_cast<const dlpack::ExchangeApi*>(header);
  }
  return nullptr;
}

// The library whose type this is, or is derived from.
void find_library(PyTypeObject* type, TypeInfo& info) {
  if (is_device_array_type(type)) info.library = Library::kFlashport;
  PyObject* bases = type->tp_mro;
  for (Py_ssize_t i = 0; bases != nullptr && i < PyTuple_GET_SIZE(bases); ++i) {
    if (info.library != Library::kOther) return;
    const py::handle base = PyTuple_GET_ITEM(bases, i);
    const std::string module = py::str(py::getattr(base, "__module__", py::str("")));
    const std::string_view root = std::string_view(module).substr(0, module.find('.'));
    if (root == "numpy") info.library = Library::kNumpy;
    if (root == "torch" && Torch::get().is_tensor_type(type)) info.library = Library::kTorch;
    if (root == "cupy") info.library = Library::kCupy;
    if (root == "jax" || root == "jaxlib") info.library = Library::kJax;
    info.is_masked = (module + ".").starts_with("numpy.ma.");
  }
}

}  // namespace

const TypeInfo& find_type_info(PyTypeObject* type) {
  static auto* known = new std::unordered_map<PyTypeObject*, TypeInfo>;
  auto found = known->find(type);
  if (found == known->end()) {
    TypeInfo info;
    find_library(type, info);
    info.exchange = find_exchange_api(type);
    info.stands_for_others = info.library == Library::kTorch && Torch::get().stands_for_others(type);
    Py_INCREF(type);  // its address is the key
    found = known->emplace(type, info).first;
  }
  return found->second;
}

std::optional<DType> dtype_from_dlpack(dlpack::DataType type) {
  if (type.lanes != 1) return std::nullopt;
  switch (type.code << 8 | type.bits) {
    case dlpack::kFloat << 8 | 32: return DType::kFloat32;
    case dlpack::kFloat << 8 | 16: return DType::kFloat16;
    case dlpack::kBfloat << 8 | 16: return DType::kBFloat16;
    case dlpack::kFloat8E4M3Fn << 8 | 8: return DType::kFp8E4M3;
    case dlpack::kFloat8E4M3Fnuz << 8 | 8: return DType::kFp8E4M3Fnuz;
    case dlpack::kFloat8E5M2 << 8 | 8: return DType::kFp8E5M2;
    case dlpack::kInt << 8 | 32: return DType::kInt32;
    case dlpack::kInt << 8 | 64: return DType::kInt64;
    case dlpack::kUInt << 8 | 32: return DType::kUInt32;
    case dlpack::kUInt << 8 | 8: return DType::kUInt8;
    case dlpack::kFloat << 8 | 64: return DType::kFloat64;
    case dlpack::kInt << 8 | 8: return DType::kInt8;
    case dlpack::kInt << 8 | 16: return DType::kInt16;
    case dlpack::kBool << 8 | 8: return DType::kBool;
    default: return std::nullopt;
  }
}

dlpack::DataType dtype_to_dlpack(DType type) {
  const auto bits = static_cast<std::uint8_t>(element_size(type) * 8);
  switch (type) {
    case DType::kFloat64:
    case DType::kFloat32:
    case DType::kFloat16: return {dlpack::kFloat, bits, 1};
    case DType::kBFloat16: return {dlpack::kBfloat, bits, 1};
    case DType::kFp8E4M3: return {dlpack::kFloat8E4M3Fn, bits, 1};
    case DType::kFp8E4M3Fnuz: return {dlpack::kFloat8E4M3Fnuz, bits, 1};
    case DType::kFp8E5M2: return {dlpack::kFloat8E5M2, bits, 1};
    case DType::kInt8:
    case DType::kInt16:
    case DType::kInt32:
    case DType::kInt64: return {dlpack::kInt, bits, 1};
    case DType::kBool: return {dlpack::kBool, bits, 1};
    case DType::kUInt32:
    case DType::kUInt8: break;
  }
  return {dlpack::kUInt, bits, 1};
}

dlpack::Device device_to_dlpack(Device device) {
  switch (device.kind) {
    case DeviceKind::kCuda: return {dlpack::kCuda, device.index};
    case DeviceKind::kHip: return {dlpack::kRocm, device.index};
    case DeviceKind::kCpu: break;
  }
  return {dlpack::kCpu, 0};
}

std::string dlpack_type_name(dlpack::DataType type) {
  static constexpr const char* kCodes[] = {"int",           "uint",
                                           "float",         "opaque",
                                           "bfloat",        "complex",
                                           "bool",          "float8_e3m4",
                                           "float8_e4m3",   "float8_e4m3b11fnuz",
                                           "float8_e4m3fn", "float8_e4m3fnuz",
                                           "float8_e5m2",   "float8_e5m2fnuz",
                                           "float8_e8m0fnu"};
  std::string text = type.code < std::size(kCodes) ? kCodes[type.code] : "type " + std::to_string(type.code) + " of ";
  if (type.code <= 5) text += std::to_string(type.bits);
  if (type.lanes != 1) text += "x" + std::to_string(type.lanes);
  return text;
}

}  // namespace flashport::python
