// The table of functions that a backend shared object (libflashport_cuda.so, libflashport_hip.so) exports as
// `flashport_backend`, and that the CPU backend, built in, provides as `cpu_backend()`. Everything above it is
// vendor-free; everything below it is one vendor's runtime. A function that can fail returns null, or an error text
// that stays valid until the thread's next call.
#pragma once

#include <cstddef>
#include <cstdint>

#include <flashport/types.h>

#include "common/host/kernel_entry.h"

namespace flashport {

inline constexpr int kBackendAbiVersion = 14;

struct BackendDevice {
  char name[128];
  char architecture[64];  // the vendor's name for it: "x86_64", "sm_90", "gfx942:sramecc+:xnack-"
  char target[32];        // empty: no compiled target serves this architecture
  int multiprocessors;
  std::int64_t memory_bytes;
};

struct BackendAbi {
  int abi_version;
  DeviceKind kind;
  const char* name;            // "cpu", "cuda", "hip"
  const char* const* targets;  // null-terminated

  const char* (*device_count)(int* count);
  const char* (*device_info)(int device, BackendDevice* info);

  // All kernels of a target, in table order.
  const KernelEntry* (*kernels)(const char* target, int* count);
  // Blocks of this kernel that one multiprocessor holds at a time.
  const char* (*occupancy)(int device, const KernelEntry* kernel, int* blocks);
  // Runs the blocks of `grid`, none if it is empty. The device is made current for the call and restored after it.
  const char* (*launch)(int device, Stream stream, const KernelEntry* kernel, const LaunchGrid& grid,
                        const void* params, std::size_t params_bytes);

  const char* (*allocate)(int device, std::size_t bytes, void** memory);
  const char* (*release)(int device, void* memory);
  const char* (*copy)(int device, Stream stream, void* to, const void* from, std::size_t bytes);  // any direction
  const char* (*fill_zero)(int device, Stream stream, void* memory, std::size_t bytes);
  const char* (*synchronize)(int device, Stream stream);
  // The id of the graph capture that `stream` is in; 0 when it is not capturing.
  const char* (*capture_id)(int device, Stream stream, std::uint64_t* id);
};

// The backend that is linked into flashport itself (cpu/runtime/backend.cpp).
const BackendAbi* cpu_backend();

}  // namespace flashport
