#include "hip/runtime/hip_api.h"

#include <dlfcn.h>
#include <link.h>

#include <cstdlib>
#include <filesystem>
#include <mutex>
#include <string_view>
#include <system_error>

#include "hip/runtime/device_target.h"

namespace flashport::hip_runtime {
namespace {

namespace fs = std::filesystem;

// The majors whose ABI the table describes, newest first. Torch wheels contain the name without a version.
constexpr const char* kFileNames[] = {"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"};

struct Library {
  void* handle = nullptr;
  std::string path;
};

// The copy that this process has already, whatever its file is called: wheels may add a hash to a library's name.
Library open_loaded() {
  Library library;
  const auto visit = [](dl_phdr_info* object, std::size_t, void* found) {
    const std::string_view path(object->dlpi_name == nullptr ? "" : object->dlpi_name);
    if (!path.substr(path.rfind('/') + 1).starts_with("libamdhip64")) return 0;
    *static_cast<std::string*>(found) = path;
    return 1;
  };
  if (dl_iterate_phdr(visit, &library.path) != 0) {
    library.handle = dlopen(library.path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
  }
  return library;
}

Library open_in(const fs::path& folder) {
  for (const char* name : kFileNames) {
    const fs::path file = folder / name;
    std::error_code ignored;
    if (!fs::exists(file, ignored)) continue;
    if (void* handle = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL)) return {handle, file.string()};
  }
  return {};
}

// Python's wheels: this library lies somewhere below site-packages; torch's wheel may carry a runtime of its own, which
// importing torch would load, and the wheel rocm-sdk-core has one.
Library open_in_wheels() {
  Dl_info self;
  if (dladdr(reinterpret_cast<const void*>(&open_in_wheels), &self) == 0 || self.dli_fname == nullptr) return {};
  std::error_code ignored;
  for (fs::path folder = fs::absolute(self.dli_fname, ignored).parent_path(); folder.has_relative_path();
       folder = folder.parent_path()) {
    for (const char* wheel : {"torch/lib", "_rocm_sdk_core/lib"}) {
      if (Library library = open_in(folder / wheel); library.handle != nullptr) return library;
    }
  }
  return {};
}

Library open_in_system(std::string& error) {
  for (const char* name : kFileNames) {
    if (void* handle = dlopen(name, RTLD_NOW | RTLD_LOCAL)) return {handle, name};
    if (error.empty()) error = dlerror();
  }
  if (const char* rocm = std::getenv("ROCM_PATH"); rocm != nullptr && *rocm != '\0') {
    if (Library library = open_in(fs::path(rocm) / "lib"); library.handle != nullptr) return library;
  }
  return open_in("/opt/rocm/lib");
}

Library open_library(std::string& error) {
  Library library = open_loaded();
  if (library.handle == nullptr) library = open_in_wheels();
  if (library.handle == nullptr) library = open_in_system(error);
  if (library.handle == nullptr) {
    error =
        "no HIP runtime (libamdhip64.so.7 or .6): not loaded in this process, not in a torch or rocm-sdk-core wheel "
        "beside this library, not on the loader's path, not in $ROCM_PATH/lib or /opt/rocm/lib (" +
        error + "). Install ROCm, or a ROCm build of torch";
  }
  return library;
}

bool fill(HipApi& api, const Library& library, std::string& error) {
  api.path = library.path;
  const auto find = [&](auto& function, const char* name) {
    void* symbol = dlsym(library.handle, name);
    if (symbol == nullptr && error.empty()) {
      error = library.path + " has no " + name + ": " + hip_version_text(kOldestHip) + " or later is needed";
    }
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(symbol);
  };
  find(api.get_error_name, "hipGetErrorName");
  find(api.get_error_string, "hipGetErrorString");
  find(api.get_last_error, "hipGetLastError");
  find(api.runtime_get_version, "hipRuntimeGetVersion");
  find(api.get_device_count, "hipGetDeviceCount");
  find(api.get_device, "hipGetDevice");
  find(api.set_device, "hipSetDevice");
  find(api.get_device_properties, "hipGetDevicePropertiesR0600");
  find(api.allocate, "hipMalloc");
  find(api.free, "hipFree");
  find(api.memcpy_async, "hipMemcpyAsync");
  find(api.memset_async, "hipMemsetAsync");
  find(api.stream_synchronize, "hipStreamSynchronize");
  find(api.stream_get_capture_info, "hipStreamGetCaptureInfo");
  find(api.thread_exchange_capture_mode, "hipThreadExchangeStreamCaptureMode");
  find(api.module_load_data, "hipModuleLoadData");
  find(api.module_get_function, "hipModuleGetFunction");
  find(api.module_launch_kernel, "hipModuleLaunchKernel");
  find(api.module_occupancy, "hipModuleOccupancyMaxActiveBlocksPerMultiprocessor");
  return error.empty();
}

}  // namespace

const HipApi* hip_api(std::string& error) {
  // A failure is not kept: the process may load a runtime later. A table, once filled, holds for good.
  static std::mutex mutex;
  static HipApi api;
  static bool filled = false;
  const std::lock_guard lock(mutex);
  if (filled) return &api;
  std::string reason;
  const Library library = open_library(reason);
  if (library.handle != nullptr) {
    reason.clear();
    filled = fill(api, library, reason);
  }
  if (filled) return &api;
  error = reason;
  return nullptr;
}

}  // namespace flashport::hip_runtime
