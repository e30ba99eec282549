// The CPU backend: one device, whose multiprocessors are the threads of a pool. A launch is done when it returns;
// streams have no meaning; allocate() gives 64-byte aligned memory. A kernel's handle is a cpu_runtime::Kernel.
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <thread>

#include "common/host/backend_support.h"
#include "cpu/runtime/device_target.h"
#include "cpu/runtime/kernel_table.h"
#include "cpu/runtime/thread_pool.h"

namespace flashport {
namespace cpu_runtime {
namespace {

constexpr int kMaxThreads = 1024;

// What the environment and the machine decide, once.
struct Settings {
  std::string error;  // not empty: the device cannot be used, for this reason
  const TargetKernels* target = nullptr;
  int threads = 1;

  Settings() : target(choose_target(kernel_tables(), std::getenv("FLASHPORT_CPU_TARGET"), error)) {
    threads = static_cast<int>(std::thread::hardware_concurrency());
    if (const char* text = std::getenv("FLASHPORT_NUM_THREADS"); text != nullptr && *text != '\0') {
      const char* end = text + std::strlen(text);
      const auto parsed = std::from_chars(text, end, threads);
      if (parsed.ec != std::errc() || parsed.ptr != end || threads < 1 || threads > kMaxThreads) {
        error = "FLASHPORT_NUM_THREADS must be a whole number from 1 to " + std::to_string(kMaxThreads) +
                " (not set: one thread for each processor), got \"" + text + "\"";
      }
    }
    threads = threads < 1 ? 1 : threads > kMaxThreads ? kMaxThreads : threads;
  }
};

const Settings& settings() {
  static const Settings instance;
  return instance;
}

const KernelIndex& kernel_index() {
  static const KernelIndex index(kernel_tables());
  return index;
}

std::atomic<ThreadPool*> pool_of_process = nullptr;

// Never destroyed: a forked child has the object without its threads, and must neither use nor join them.
ThreadPool& pool() {
  ThreadPool* current = pool_of_process.load(std::memory_order_acquire);
  if (current != nullptr) return *current;
  [[maybe_unused]] static const int registered =
      pthread_atfork(nullptr, nullptr, [] { pool_of_process.store(nullptr, std::memory_order_release); });
  auto* fresh = new ThreadPool(settings().threads);
  if (pool_of_process.compare_exchange_strong(current, fresh, std::memory_order_acq_rel)) return *fresh;
  delete fresh;
  return *current;
}

const char* check_device(int device) {
  if (!settings().error.empty()) return settings().error.c_str();
  if (device == 0) return nullptr;
  return keep_error("cpu: there is one device, cpu:0; got index " + std::to_string(device));
}

// The processor's name as Linux on x86 tells it.
std::string processor_name() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    const std::size_t colon = line.find(": ");
    if (line.starts_with("model name") && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "CPU";
}

#if defined(__x86_64__)
constexpr char kArchitecture[] = "x86_64";
#elif defined(__aarch64__)
constexpr char kArchitecture[] = "aarch64";
#else
constexpr char kArchitecture[] = "unknown";
#endif

template <std::size_t kSize>
void copy_text(char (&to)[kSize], const std::string& text) {
  const std::size_t length = text.copy(to, kSize - 1);
  to[length] = '\0';
}

const char* device_count(int* count) {
  *count = settings().error.empty() ? 1 : 0;
  return check_device(0);
}

const char* device_info(int device, BackendDevice* info) {
  if (const char* error = check_device(device)) return error;
  *info = {};
  copy_text(info->name, processor_name());
  copy_text(info->architecture, kArchitecture);
  copy_text(info->target, "cpu");
  info->multiprocessors = settings().threads;
  info->memory_bytes = static_cast<std::int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
  return nullptr;
}

// "cpu" is the target that was chosen for this machine; a compiled one can be asked for by its own name too.
const KernelEntry* kernels(const char* target, int* count) {
  const TargetKernels* table = std::string_view(target) == "cpu" ? settings().target : kernel_index().find(target);
  *count = table == nullptr ? 0 : table->count;
  return table == nullptr ? nullptr : table->entries;
}

const char* occupancy(int device, const KernelEntry*, int* blocks) {
  *blocks = 4;  // with more and smaller blocks, a thread that other work held up delays the launch less
  return check_device(device);
}

const char* launch(int device, Stream, const KernelEntry* kernel, const LaunchGrid& grid, const void* params,
                   std::size_t) {
  if (const char* error = check_device(device)) return error;
  if (grid.is_empty()) return nullptr;
  const auto function = reinterpret_cast<Kernel>(const_cast<void*>(kernel->handle));
  const auto scratch_bytes = static_cast<std::size_t>(kernel->shared_bytes);
  if (pool().run(function, params, grid.x * grid.y * grid.z, scratch_bytes)) return nullptr;
  return keep_error(std::string(kernel->key) + ": no memory for " + std::to_string(scratch_bytes) +
                    " bytes of scratch");
}

const char* allocate(int device, std::size_t bytes, void** memory) {
  if (const char* error = check_device(device)) return error;
  constexpr std::size_t kAlignment = 64;
  const std::size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  *memory = rounded < bytes ? nullptr : std::aligned_alloc(kAlignment, rounded == 0 ? kAlignment : rounded);
  return *memory != nullptr ? nullptr : keep_error("cpu: no memory for " + std::to_string(bytes) + " bytes");
}

const char* release(int device, void* memory) {
  std::free(memory);
  return check_device(device);
}

const char* copy(int device, Stream, void* to, const void* from, std::size_t bytes) {
  if (bytes != 0) std::memmove(to, from, bytes);
  return check_device(device);
}

const char* fill_zero(int device, Stream, void* memory, std::size_t bytes) {
  if (bytes != 0) std::memset(memory, 0, bytes);
  return check_device(device);
}

const char* synchronize(int device, Stream) { return check_device(device); }

const char* capture_id(int device, Stream, std::uint64_t* id) {
  *id = 0;
  return check_device(device);
}

}  // namespace
}  // namespace cpu_runtime

const BackendAbi* cpu_backend() {
  using namespace cpu_runtime;
  static const BackendAbi abi = {
      .abi_version = kBackendAbiVersion,
      .kind = DeviceKind::kCpu,
      .name = "cpu",
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

}  // namespace flashport
