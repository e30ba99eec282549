// Names of the public value types, and the version.
#include <flashport/backend.h>
#include <flashport/types.h>

namespace flashport {

const char* dtype_name(DType type) {
  switch (type) {
    case DType::kFloat32: return "float32";
    case DType::kFloat16: return "float16";
    case DType::kBFloat16: return "bfloat16";
    case DType::kFp8E4M3: return "float8_e4m3fn";
    case DType::kFp8E4M3Fnuz: return "float8_e4m3fnuz";
    case DType::kFp8E5M2: return "float8_e5m2";
    case DType::kInt32: return "int32";
    case DType::kInt64: return "int64";
    case DType::kUInt32: return "uint32";
    case DType::kUInt8: return "uint8";
    case DType::kFloat64: return "float64";
    case DType::kInt8: return "int8";
    case DType::kInt16: return "int16";
    case DType::kBool: return "bool";
  }
  return "unknown dtype";
}

std::string device_name(Device device) {
  switch (device.kind) {
    case DeviceKind::kCpu: return "cpu";
    case DeviceKind::kCuda: return "cuda:" + std::to_string(device.index);
    case DeviceKind::kHip: return "hip:" + std::to_string(device.index);
  }
  return "unknown device";
}

const char* version() { return FLASHPORT_VERSION; }

}  // namespace flashport
