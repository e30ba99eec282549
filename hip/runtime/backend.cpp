// The HIP backend. A kernel's handle is a KernelSymbol: a name in an embedded code object, which is loaded on a device
// when the first of its kernels is used there. A capturing stream takes a first launch too, but loading may wait for
// the device: run once before capturing.
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/host/backend_support.h"
#include "hip/runtime/code_object.h"
#include "hip/runtime/device_target.h"
#include "hip/runtime/hip_api.h"
#include "hip/runtime/kernel_table.h"

namespace flashport::hip_runtime {
namespace {

struct KernelState {
  std::atomic<HipFunction> function = nullptr;  // null: not loaded yet
  std::atomic<int> occupancy = 0;               // 0: not asked yet
};

// What needs a runtime; made once there is one.
struct Runtime {
  const HipApi& hip;
  int devices = 0;
  HipError count_error;
  std::unique_ptr<KernelState[]> kernels;
  std::mutex loading;
  std::vector<std::map<const CodeObject*, HipModule>> modules;  // of each device, guarded by `loading`

  Runtime(const HipApi& api, int kernel_count) : hip(api), count_error(api.get_device_count(&devices)) {
    kernels.reset(new KernelState[static_cast<std::size_t>(devices) * kernel_count]);
    modules.resize(static_cast<std::size_t>(devices));
  }
};

const KernelIndex& kernel_index() {
  static const KernelIndex index(kernel_tables());
  return index;
}

// Null where no HIP runtime is installed, and `error` says so.
Runtime* runtime(const char*& error) {
  static std::atomic<Runtime*> made = nullptr;
  static std::mutex making;
  if (Runtime* present = made.load(std::memory_order_acquire)) return present;
  const std::lock_guard lock(making);
  if (Runtime* present = made.load(std::memory_order_relaxed)) return present;
  std::string reason;
  const HipApi* hip = hip_api(reason);
  if (hip == nullptr) {
    error = keep_error("hip: " + reason);
    return nullptr;
  }
  // Never destroyed: at exit the HIP runtime may be gone before us.
  auto* fresh = new Runtime(*hip, kernel_index().size());
  made.store(fresh, std::memory_order_release);
  return fresh;
}

// Null on success; else what failed and why. A failed call also leaves its code in this thread's last error, which
// other users of the same runtime would find. As the returned text reports the failure, that code is cleared.
const char* check(const HipApi& hip, HipError code, const char* call) {
  if (code == 0) return nullptr;
  hip.get_last_error();
  return keep_error(std::string(call) + ": " + hip.get_error_string(code) + " (" + hip.get_error_name(code) + ", " +
                    std::to_string(code) + ")");
}

// Finds the runtime, makes `device` current and restores what was. `error` is set if that failed.
class DeviceScope {
 public:
  explicit DeviceScope(int device) : runtime_(runtime(error)) {
    if (runtime_ == nullptr) return;
    if (device < 0 || device >= runtime_->devices) {
      error = keep_error("hip: there are " + std::to_string(runtime_->devices) + " devices; got index " +
                         std::to_string(device));
      return;
    }
    error = check(hip(), hip().get_device(&previous_), "hipGetDevice");
    if (error != nullptr || previous_ == device) return;
    error = check(hip(), hip().set_device(device), "hipSetDevice");
    changed_ = error == nullptr;
  }
  ~DeviceScope() {
    if (changed_) hip().set_device(previous_);
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

  [[nodiscard]] const HipApi& hip() const { return runtime_->hip; }
  [[nodiscard]] Runtime& get() const { return *runtime_; }

  const char* error = nullptr;

 private:
  Runtime* runtime_;
  int previous_ = 0;
  bool changed_ = false;
};

// Lets this thread allocate, free and wait while another thread captures a graph in global mode; without it such a call
// would invalidate that capture. On a stream that is itself being captured these calls are errors all the same.
class AsideFromCaptures {
 public:
  explicit AsideFromCaptures(const HipApi& hip) : hip_(hip) { hip_.thread_exchange_capture_mode(&mode_); }
  ~AsideFromCaptures() { hip_.thread_exchange_capture_mode(&mode_); }
  AsideFromCaptures(const AsideFromCaptures&) = delete;
  AsideFromCaptures& operator=(const AsideFromCaptures&) = delete;

 private:
  const HipApi& hip_;
  HipCaptureMode mode_ = kHipCaptureRelaxed;  // while in scope: the mode to go back to
};

KernelState& state_of(Runtime& runtime, int device, const KernelEntry* kernel) {
  return runtime.kernels[static_cast<std::size_t>(device) * kernel_index().size() + kernel_index().index_of(kernel)];
}

HipStream stream_of(Stream stream) { return reinterpret_cast<HipStream>(stream); }

// The kernel's function on `device`, which must be current.
const char* load(Runtime& runtime, int device, const KernelEntry* kernel, HipFunction& function) {
  KernelState& kernel_state = state_of(runtime, device, kernel);
  function = kernel_state.function.load(std::memory_order_acquire);
  if (function != nullptr) return nullptr;
  const HipApi& hip = runtime.hip;
  const auto& symbol = *static_cast<const KernelSymbol*>(kernel->handle);
  const std::lock_guard lock(runtime.loading);
  HipModule& module = runtime.modules[static_cast<std::size_t>(device)][symbol.object];
  if (module == nullptr) {
    if (const char* error = check(hip, hip.module_load_data(&module, symbol.object->begin), "hipModuleLoadData")) {
      module = nullptr;
      return error;
    }
  }
  if (const char* error = check(hip, hip.module_get_function(&function, module, symbol.name), "hipModuleGetFunction")) {
    return error;
  }
  kernel_state.function.store(function, std::memory_order_release);
  return nullptr;
}

const char* device_count(int* count) {
  *count = 0;
  const char* error = nullptr;
  const Runtime* present = runtime(error);
  if (present == nullptr) return error;
  *count = present->devices;
  return check(present->hip, present->count_error, "hipGetDeviceCount");
}

const char* device_info(int device, BackendDevice* info) {
  *info = {};
  const char* error = nullptr;
  const Runtime* present = runtime(error);
  if (present == nullptr) return error;
  HipDeviceProperties properties;
  const HipError code = present->hip.get_device_properties(&properties, device);
  error = check(present->hip, code, "hipGetDeviceProperties");
  if (error != nullptr) return error;
  const std::string_view name(properties.name);
  const std::string_view architecture(properties.gcn_arch_name);
  const std::string_view target = target_of(architecture);
  name.copy(info->name, sizeof(info->name) - 1);
  architecture.copy(info->architecture, sizeof(info->architecture) - 1);
  if (kernel_index().find(target) != nullptr) {
    int version = 0;
    error = check(present->hip, present->hip.runtime_get_version(&version), "hipRuntimeGetVersion");
    if (error != nullptr) return error;
    if (version < oldest_hip(target)) {
      return keep_error("hip: " + present->hip.path + " is of " + hip_version_text(version) + ", and " +
                        std::string(target) + " needs " + hip_version_text(oldest_hip(target)) + " or later");
    }
    target.copy(info->target, sizeof(info->target) - 1);
  }
  info->multiprocessors = properties.multiprocessor_count;
  info->memory_bytes = static_cast<std::int64_t>(properties.total_global_memory);
  return nullptr;
}

const KernelEntry* kernels(const char* target, int* count) {
  const TargetKernels* table = kernel_index().find(target);
  *count = table == nullptr ? 0 : table->count;
  return table == nullptr ? nullptr : table->entries;
}

const char* occupancy(int device, const KernelEntry* kernel, int* blocks) {
  const DeviceScope scope(device);
  if (scope.error != nullptr) return scope.error;
  KernelState& kernel_state = state_of(scope.get(), device, kernel);
  *blocks = kernel_state.occupancy.load(std::memory_order_relaxed);
  if (*blocks != 0) return nullptr;
  HipFunction function = nullptr;
  if (const char* error = load(scope.get(), device, kernel, function)) return error;
  const HipError code =
      scope.hip().module_occupancy(blocks, function, kernel->threads, static_cast<std::size_t>(kernel->shared_bytes));
  if (const char* error = check(scope.hip(), code, "hipModuleOccupancyMaxActiveBlocksPerMultiprocessor")) return error;
  if (*blocks == 0) {
    return keep_error(std::string(kernel->key) + ": a multiprocessor cannot hold one block of " +
                      std::to_string(kernel->threads) + " threads");
  }
  *blocks *= kernel->teams;
  kernel_state.occupancy.store(*blocks, std::memory_order_relaxed);
  return nullptr;
}

const char* launch(int device, Stream stream, const KernelEntry* kernel, const LaunchGrid& grid, const void* params,
                   std::size_t params_bytes) {
  if (grid.is_empty()) return nullptr;
  if (grid.cluster > 1) return keep_error(std::string(kernel->key) + ": HIP devices have no clusters of blocks");
  const std::int64_t blocks = (grid.x + kernel->teams - 1) / kernel->teams;  // the last few teams: idle
  // The hardware counts work-items, not blocks, in 32 bits.
  if (blocks * kernel->threads > INT64_C(0xffffffff) || blocks > INT64_C(0x7fffffff) || grid.y > 0xffff ||
      grid.z > 0xffff) {
    return keep_error(std::string(kernel->key) +
                      ": a grid has fewer than 2^32 work-items along x and 65536 blocks along y and z, got " +
                      std::to_string(blocks) + " x " + std::to_string(grid.y) + " x " + std::to_string(grid.z) +
                      " blocks of " + std::to_string(kernel->threads));
  }
  const DeviceScope scope(device);
  if (scope.error != nullptr) return scope.error;
  HipFunction function = nullptr;
  if (const char* error = load(scope.get(), device, kernel, function)) return error;
  void* extra[] = {kHipLaunchParamBufferPointer, const_cast<void*>(params), kHipLaunchParamBufferSize, &params_bytes,
                   kHipLaunchParamEnd};
  const HipError code =
      scope.hip().module_launch_kernel(function, static_cast<unsigned>(blocks), static_cast<unsigned>(grid.y),
                                       static_cast<unsigned>(grid.z), static_cast<unsigned>(kernel->threads), 1, 1,
                                       static_cast<unsigned>(kernel->shared_bytes), stream_of(stream), nullptr, extra);
  return check(scope.hip(), code, "hipModuleLaunchKernel");
}

const char* allocate(int device, std::size_t bytes, void** memory) {
  const DeviceScope scope(device);
  if (scope.error != nullptr) return scope.error;
  const AsideFromCaptures aside(scope.hip());
  return check(scope.hip(), scope.hip().allocate(memory, bytes), "hipMalloc");
}

const char* release(int device, void* memory) {
  const DeviceScope scope(device);
  if (scope.error != nullptr) return scope.error;
  const AsideFromCaptures aside(scope.hip());
  return check(scope.hip(), scope.hip().free(memory), "hipFree");
}

const char* copy(int device, Stream stream, void* to, const void* from, std::size_t bytes) {
  const DeviceScope scope(device);
  if (scope.error != nullptr) return scope.error;
  const HipError code = scope.hip().memcpy_async(to, from, bytes, kHipMemcpyDefault, stream_of(stream));
  return check(scope.hip(), code, "hipMemcpyAsync");
}

const char* fill_zero(int device, Stream stream, void* memory, std::size_t bytes) {
  const DeviceScope scope(device);
  if (scope.error != nullptr) return scope.error;
  return check(scope.hip(), scope.hip().memset_async(memory, 0, bytes, stream_of(stream)), "hipMemsetAsync");
}

const char* synchronize(int device, Stream stream) {
  const DeviceScope scope(device);
  if (scope.error != nullptr) return scope.error;
  const AsideFromCaptures aside(scope.hip());
  return check(scope.hip(), scope.hip().stream_synchronize(stream_of(stream)), "hipStreamSynchronize");
}

const char* capture_id(int device, Stream stream, std::uint64_t* id) {
  *id = 0;
  // The default stream cannot be captured, and to ask about it while another stream is captured is an error.
  if (stream == 0) return nullptr;
  const DeviceScope scope(device);
  if (scope.error != nullptr) return scope.error;
  HipCaptureStatus status = kHipCaptureNone;
  unsigned long long capture = 0;
  const HipError code = scope.hip().stream_get_capture_info(stream_of(stream), &status, &capture);
  if (const char* error = check(scope.hip(), code, "hipStreamGetCaptureInfo")) return error;
  if (status != kHipCaptureNone) *id = capture;
  return nullptr;
}

}  // namespace
}  // namespace flashport::hip_runtime

extern "C" __attribute__((visibility("default"))) const flashport::BackendAbi* flashport_backend() {
  using namespace flashport::hip_runtime;
  static const flashport::BackendAbi abi = {
      .abi_version = flashport::kBackendAbiVersion,
      .kind = flashport::DeviceKind::kHip,
      .name = "hip",
      .targets = kernel_index().names(),
      .device_count = device_count,
      .device_info = device_info,
      .kernels = kernels,
      .occupancy = occupancy,
      .launch = launch,
      .allocate = allocate,
      .release = release,
      .copy = copy,
      .fill_zero = fill_zero,
      .synchronize = synchronize,
      .capture_id = capture_id,
  };
  return &abi;
}
