// The CUDA backend. The runtime is linked statically and works in the primary contexts that the rest of the process
// uses, so streams and memory of other CUDA users are valid here. A kernel's handle is the host address of its
// __global__ function. What never changes about a kernel on a device is asked once and kept.
#include <cuda_runtime_api.h>

#include <atomic>
#include <climits>
#include <memory>
#include <string>

#include "common/host/backend_support.h"
#include "cuda/runtime/device_target.h"
#include "cuda/runtime/kernel_table.h"

namespace flashport::cuda_runtime {
namespace {

constexpr int kSharedBytesWithoutAsking = 48 * 1024;

// Null on success; else what failed and why. A failed call also leaves its code in this thread's last error. As
// the returned text reports the failure, that code is cleared.
const char* check(cudaError_t code, const char* call) {
  if (code == cudaSuccess) return nullptr;
  cudaGetLastError();
  return keep_error(std::string(call) + ": " + cudaGetErrorString(code) + " (" + cudaGetErrorName(code) + ", " +
                    std::to_string(static_cast<int>(code)) + ")");
}

struct KernelState {
  std::atomic<bool> prepared = false;  // the dynamic shared memory it needs is granted
  std::atomic<int> occupancy = 0;      // 0: not asked yet
};

struct State {
  KernelIndex index{kernel_tables()};
  int devices = 0;
  cudaError_t count_error = cudaGetDeviceCount(&devices);
  std::unique_ptr<KernelState[]> kernels{new KernelState[static_cast<std::size_t>(devices) * index.size()]};

  KernelState& of(int device, const KernelEntry* kernel) {
    return kernels[static_cast<std::size_t>(device) * index.size() + index.index_of(kernel)];
  }
};

State& state() {
  static State instance;
  return instance;
}

// Makes `device` current and restores what was. `error` is set if that failed.
class DeviceScope {
 public:
  explicit DeviceScope(int device) {
    if (device < 0 || device >= state().devices) {
      error = keep_error("cuda: there are " + std::to_string(state().devices) + " devices; got index " +
                         std::to_string(device));
      return;
    }
    error = check(cudaGetDevice(&previous_), "cudaGetDevice");
    if (error != nullptr || previous_ == device) return;
    error = check(cudaSetDevice(device), "cudaSetDevice");
    changed_ = error == nullptr;
  }
  ~DeviceScope() {
    if (changed_) cudaSetDevice(previous_);
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

  const char* error = nullptr;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

// Lets this thread allocate, free and wait while another thread captures a graph in global mode; without it such a call
// would invalidate that capture. On a stream that is itself being captured these calls are errors all the same.
class AsideFromCaptures {
 public:
  AsideFromCaptures() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~AsideFromCaptures() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  AsideFromCaptures(const AsideFromCaptures&) = delete;
  AsideFromCaptures& operator=(const AsideFromCaptures&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;  // while in scope: the mode to go back to
};

cudaStream_t stream_of(Stream stream) { return reinterpret_cast<cudaStream_t>(stream); }

// The device must be current.
const char* prepare(KernelState& kernel_state, const KernelEntry* kernel) {
  if (kernel_state.prepared.load(std::memory_order_acquire)) return nullptr;
  if (kernel->shared_bytes > kSharedBytesWithoutAsking) {
    const cudaError_t code =
        cudaFuncSetAttribute(kernel->handle, cudaFuncAttributeMaxDynamicSharedMemorySize, kernel->shared_bytes);
    if (const char* error = check(code, "cudaFuncSetAttribute")) return error;
  }
  kernel_state.prepared.store(true, std::memory_order_release);
  return nullptr;
}

const char* device_count(int* count) {
  *count = state().devices;
  return check(state().count_error, "cudaGetDeviceCount");
}

const char* device_info(int device, BackendDevice* info) {
  *info = {};
  cudaDeviceProp properties;
  if (const char* error = check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties")) return error;
  const std::string name(properties.name);
  const std::string architecture = architecture_name(properties.major, properties.minor);
  const std::string target(target_of(properties.major, properties.minor));
  name.copy(info->name, sizeof(info->name) - 1);
  architecture.copy(info->architecture, sizeof(info->architecture) - 1);
  if (state().index.find(target) != nullptr) target.copy(info->target, sizeof(info->target) - 1);
  info->multiprocessors = properties.multiProcessorCount;
  info->memory_bytes = static_cast<std::int64_t>(properties.totalGlobalMem);
  return nullptr;
}

const KernelEntry* kernels(const char* target, int* count) {
  const TargetKernels* table = state().index.find(target);
  *count = table == nullptr ? 0 : table->count;
  return table == nullptr ? nullptr : table->entries;
}

const char* occupancy(int device, const KernelEntry* kernel, int* blocks) {
  const DeviceScope scope(device);
  if (scope.error != nullptr) return scope.error;
  KernelState& kernel_state = state().of(device, kernel);
  *blocks = kernel_state.occupancy.load(std::memory_order_relaxed);
  if (*blocks != 0) return nullptr;
  if (const char* error = prepare(kernel_state, kernel)) return error;
  const cudaError_t code = cudaOccupancyMaxActiveBlocksPerMultiprocessor(
      blocks, kernel->handle, kernel->threads, static_cast<std::size_t>(kernel->shared_bytes));
  if (const char* error = check(code, "cudaOccupancyMaxActiveBlocksPerMultiprocessor")) return error;
  if (*blocks == 0) {
    return keep_error(std::string(kernel->key) + ": a multiprocessor cannot hold one block of " +
                      std::to_string(kernel->threads) + " threads and " + std::to_string(kernel->shared_bytes) +
                      " bytes of shared memory");
  }
  *blocks *= kernel->teams;
  kernel_state.occupancy.store(*blocks, std::memory_order_relaxed);
  return nullptr;
}

const char* launch(int device, Stream stream, const KernelEntry* kernel, const LaunchGrid& grid, const void* params,
                   std::size_t) {
  if (grid.is_empty()) return nullptr;
  if (grid.x > INT_MAX || grid.y > 0xffff || grid.z > 0xffff) {
    return keep_error(std::string(kernel->key) + ": a grid has at most 2147483647 x 65535 x 65535 blocks, got " +
                      std::to_string(grid.x) + " x " + std::to_string(grid.y) + " x " + std::to_string(grid.z));
  }
  const DeviceScope scope(device);
  if (scope.error != nullptr) return scope.error;
  if (const char* error = prepare(state().of(device, kernel), kernel)) return error;
  void* arguments[] = {const_cast<void*>(params)};
  cudaLaunchAttribute attributes[2];
  // Kernels wait by themselves for the one before (begin_kernel()), so that they may be launched while that one ends.
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(grid.cluster), 1, 1};
  const auto blocks = static_cast<unsigned>((grid.x + kernel->teams - 1) / kernel->teams);  // the last few teams: idle
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks, static_cast<unsigned>(grid.y), static_cast<unsigned>(grid.z));
  config.blockDim = dim3(static_cast<unsigned>(kernel->threads));
  config.dynamicSmemBytes = static_cast<std::size_t>(kernel->shared_bytes);
  config.stream = stream_of(stream);
  config.attrs = attributes;
  config.numAttrs = grid.cluster > 1 ? 2 : 1;
  return check(cudaLaunchKernelExC(&config, kernel->handle, arguments), "cudaLaunchKernelExC");
}

const char* allocate(int device, std::size_t bytes, void** memory) {
  const DeviceScope scope(device);
  if (scope.error != nullptr) return scope.error;
  const AsideFromCaptures aside;
  return check(cudaMalloc(memory, bytes), "cudaMalloc");
}

const char* release(int device, void* memory) {
  const DeviceScope scope(device);
  if (scope.error != nullptr) return scope.error;
  const AsideFromCaptures aside;
  return check(cudaFree(memory), "cudaFree");
}

const char* copy(int device, Stream stream, void* to, const void* from, std::size_t bytes) {
  const DeviceScope scope(device);
  if (scope.error != nullptr) return scope.error;
  return check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_of(stream)), "cudaMemcpyAsync");
}

const char* fill_zero(int device, Stream stream, void* memory, std::size_t bytes) {
  const DeviceScope scope(device);
  if (scope.error != nullptr) return scope.error;
  return check(cudaMemsetAsync(memory, 0, bytes, stream_of(stream)), "cudaMemsetAsync");
}

const char* synchronize(int device, Stream stream) {
  const DeviceScope scope(device);
  if (scope.error != nullptr) return scope.error;
  const AsideFromCaptures aside;
  return check(cudaStreamSynchronize(stream_of(stream)), "cudaStreamSynchronize");
}

const char* capture_id(int device, Stream stream, std::uint64_t* id) {
  *id = 0;
  // The default stream cannot be captured, and to ask about it while another stream is captured is an error.
  if (stream == 0 || stream_of(stream) == cudaStreamLegacy) return nullptr;
  const DeviceScope scope(device);
  if (scope.error != nullptr) return scope.error;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long capture = 0;
  const cudaError_t code = cudaStreamGetCaptureInfo(stream_of(stream), &status, &capture);
  if (const char* error = check(code, "cudaStreamGetCaptureInfo")) return error;
  if (status != cudaStreamCaptureStatusNone) *id = capture;
  return nullptr;
}

}  // namespace
}  // namespace flashport::cuda_runtime

extern "C" __attribute__((visibility("default"))) const flashport::BackendAbi* flashport_backend() {
  using namespace flashport::cuda_runtime;
  static const flashport::BackendAbi abi = {
      .abi_version = flashport::kBackendAbiVersion,
      .kind = flashport::DeviceKind::kCuda,
      .name = "cuda",
      .targets = state().index.names(),
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
