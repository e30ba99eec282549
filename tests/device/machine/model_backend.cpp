#include "tests/device/machine/model_backend.h"

#include <cstdlib>
#include <cstring>
#include <string>

#include "common/host/loader.h"
#include "tests/device/machine/machine.h"

namespace flashport::machine {
namespace {

const char* keep(const std::string& text) {
  static std::string kept;
  kept = text;
  return kept.c_str();
}

const char* device_info(int, BackendDevice* info) {
  *info = {};
  std::strcpy(info->name, "Model");
  std::strcpy(info->architecture, "sm_90");
  std::strcpy(info->target, "sm90a");
  info->multiprocessors = 2;
  info->memory_bytes = std::int64_t{1} << 30;
  return nullptr;
}

const KernelEntry* kernels(const char*, int* count) {
  *count = static_cast<int>(model().kernels.size());
  return model().kernels.data();
}

// As the CUDA runtime counts them: teams.
const char* occupancy(int, const KernelEntry* kernel, int* blocks) {
  *blocks = kernel->teams;
  return nullptr;
}

const char* launch(int, Stream, const KernelEntry* kernel, const LaunchGrid& grid, const void* params, std::size_t) {
  if (grid.is_empty()) return nullptr;
  const ModelKernel& run_kernel = *static_cast<const ModelKernel*>(kernel->handle);
  Launch launch;
  launch.blocks = (grid.x + kernel->teams - 1) / kernel->teams;
  launch.threads = kernel->threads;
  launch.shared_bytes = kernel->shared_bytes;
  launch.seed = model().seed++;
  launch.resident = model().resident;
  launch.cluster = grid.cluster;
  launch.kernel = [&](void* shared) { run_kernel(params, shared); };
  launch.kernel_before = model().kernel_before;
  model().launched.emplace_back(kernel->key);
  const std::string error = run(launch);
  return error.empty() ? nullptr : keep(std::string(kernel->key) + ": " + error);
}

const char* allocate(int, std::size_t bytes, void** memory) {
  *memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  if (*memory == nullptr) return "no memory";
  std::memset(*memory, 0xff, (bytes + 255) / 256 * 256);
  return nullptr;
}
const char* release(int, void* memory) {
  std::free(memory);
  return nullptr;
}
const char* copy(int, Stream, void* to, const void* from, std::size_t bytes) {
  std::memcpy(to, from, bytes);
  return nullptr;
}
const char* fill_zero(int, Stream, void* memory, std::size_t bytes) {
  std::memset(memory, 0, bytes);
  return nullptr;
}

const char* const kTargets[] = {"sm90a", nullptr};
const BackendAbi kModel = {.abi_version = kBackendAbiVersion,
                           .kind = DeviceKind::kCuda,
                           .name = "cuda",
                           .targets = kTargets,
                           .device_count = [](int* count) -> const char* {
                             *count = 1;
                             return nullptr;
                           },
                           .device_info = device_info,
                           .kernels = kernels,
                           .occupancy = occupancy,
                           .launch = launch,
                           .allocate = allocate,
                           .release = release,
                           .copy = copy,
                           .fill_zero = fill_zero,
                           .synchronize = [](int, Stream) -> const char* { return nullptr; },
                           .capture_id = [](int, Stream, std::uint64_t* id) -> const char* {
                             *id = 0;
                             return nullptr;
                           }};

}  // namespace

ModelState& model() {
  static ModelState state;
  return state;
}

void install_model() { replace_backend_for_test(DeviceKind::kCuda, &kModel); }

}  // namespace flashport::machine
