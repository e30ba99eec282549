// A HIP runtime without a device, for tests of the errors about devices and versions.
// FLASHPORT_FAKE_HIP_DEVICES lists the architectures of its devices, FLASHPORT_FAKE_HIP_VERSION is what it gives for
// its version. Nothing else works.
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string>
#include <vector>

#include "hip/runtime/hip_api.h"

using flashport::hip_runtime::HipDeviceProperties;
using flashport::hip_runtime::HipError;

namespace {

constexpr HipError kInvalidDevice = 101, kNoDevice = 100, kNotSupported = 801;

std::vector<std::string> devices() {
  const char* listed = std::getenv("FLASHPORT_FAKE_HIP_DEVICES");
  std::istringstream text(listed == nullptr ? "" : listed);
  std::vector<std::string> found;
  for (std::string architecture; std::getline(text, architecture, ',');) found.push_back(architecture);
  return found;
}

}  // namespace

#define FLASHPORT_FAKE(name) extern "C" __attribute__((visibility("default"))) HipError name

FLASHPORT_FAKE(hipGetLastError)() { return 0; }
FLASHPORT_FAKE(hipRuntimeGetVersion)(int* version) {
  *version = std::atoi(std::getenv("FLASHPORT_FAKE_HIP_VERSION"));
  return 0;
}
FLASHPORT_FAKE(hipGetDeviceCount)(int* count) {
  *count = static_cast<int>(devices().size());
  return *count == 0 ? kNoDevice : 0;
}
FLASHPORT_FAKE(hipGetDevice)(int* device) {
  *device = 0;
  return 0;
}
FLASHPORT_FAKE(hipSetDevice)(int) { return 0; }
FLASHPORT_FAKE(hipGetDevicePropertiesR0600)(HipDeviceProperties* properties, int device) {
  const std::vector<std::string> all = devices();
  if (device < 0 || device >= static_cast<int>(all.size())) return kInvalidDevice;
  *properties = {};
  std::strcpy(properties->name, "Fake Card");
  std::strcpy(properties->gcn_arch_name, all[static_cast<std::size_t>(device)].c_str());
  properties->multiprocessor_count = 1;
  properties->total_global_memory = 1 << 30;
  return 0;
}

extern "C" __attribute__((visibility("default"))) const char* hipGetErrorName(HipError) { return "fake"; }
extern "C" __attribute__((visibility("default"))) const char* hipGetErrorString(HipError) { return "not there"; }

#define FLASHPORT_FAKE_NONE(name) \
  FLASHPORT_FAKE(name)() { return kNotSupported; }
FLASHPORT_FAKE_NONE(hipMalloc)
FLASHPORT_FAKE_NONE(hipFree)
FLASHPORT_FAKE_NONE(hipMemcpyAsync)
FLASHPORT_FAKE_NONE(hipMemsetAsync)
FLASHPORT_FAKE_NONE(hipStreamSynchronize)
FLASHPORT_FAKE_NONE(hipStreamGetCaptureInfo)
FLASHPORT_FAKE_NONE(hipThreadExchangeStreamCaptureMode)
FLASHPORT_FAKE_NONE(hipModuleLoadData)
FLASHPORT_FAKE_NONE(hipModuleGetFunction)
FLASHPORT_FAKE_NONE(hipModuleLaunchKernel)
FLASHPORT_FAKE_NONE(hipModuleOccupancyMaxActiveBlocksPerMultiprocessor)
