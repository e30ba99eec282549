// The functions of AMD's HIP runtime that flashport uses, as a table that is filled at run time. Nothing links against
// libamdhip64, because that could load a second runtime into a process that has one already (torch has its own). The
// table comes from the copy that is loaded, else from the ROCm wheels next to this library, else from the system. Types
// and values are those of HIP 6.2 to 7.2; tests/platform/hip_abi_check.cpp holds them against AMD's headers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace flashport::hip_runtime {

using HipError = std::int32_t;                   // hipError_t; 0 is hipSuccess
using HipStream = struct ihipStream_t*;          // hipStream_t
using HipModule = struct ihipModule_t*;          // hipModule_t
using HipFunction = struct ihipModuleSymbol_t*;  // hipFunction_t
using HipMemcpyKind = std::int32_t;              // hipMemcpyKind
using HipCaptureStatus = std::int32_t;           // hipStreamCaptureStatus
using HipCaptureMode = std::int32_t;             // hipStreamCaptureMode

inline constexpr HipMemcpyKind kHipMemcpyDefault = 4;
inline constexpr HipCaptureStatus kHipCaptureNone = 0;
inline constexpr HipCaptureMode kHipCaptureRelaxed = 2;

// Keys of hipModuleLaunchKernel's `extra`: all arguments as one buffer.
inline void* const kHipLaunchParamBufferPointer = reinterpret_cast<void*>(std::uintptr_t{1});
inline void* const kHipLaunchParamBufferSize = reinterpret_cast<void*>(std::uintptr_t{2});
inline void* const kHipLaunchParamEnd = reinterpret_cast<void*>(std::uintptr_t{3});

// hipDeviceProp_tR0600: the members that are read, each at its offset.
struct HipDeviceProperties {
  char name[256];
  char unused_0[32];
  std::size_t total_global_memory;
  char unused_1[92];
  int multiprocessor_count;
  char unused_2[768];
  char gcn_arch_name[256];
  char unused_3[56];
};
static_assert(offsetof(HipDeviceProperties, total_global_memory) == 288);
static_assert(offsetof(HipDeviceProperties, multiprocessor_count) == 388);
static_assert(offsetof(HipDeviceProperties, gcn_arch_name) == 1160);
static_assert(sizeof(HipDeviceProperties) == 1472);

struct HipApi {
  std::string path;  // the file that the functions come from

  const char* (*get_error_name)(HipError);
  const char* (*get_error_string)(HipError);
  HipError (*get_last_error)();
  HipError (*runtime_get_version)(int* version);  // major * 10^7 + minor * 10^5 + patch
  HipError (*get_device_count)(int* count);
  HipError (*get_device)(int* device);
  HipError (*set_device)(int device);
  HipError (*get_device_properties)(HipDeviceProperties* properties, int device);
  HipError (*allocate)(void** memory, std::size_t bytes);
  HipError (*free)(void* memory);
  HipError (*memcpy_async)(void* to, const void* from, std::size_t bytes, HipMemcpyKind, HipStream);
  HipError (*memset_async)(void* memory, int value, std::size_t bytes, HipStream);
  HipError (*stream_synchronize)(HipStream);
  HipError (*stream_get_capture_info)(HipStream, HipCaptureStatus* status, unsigned long long* id);
  HipError (*thread_exchange_capture_mode)(HipCaptureMode* mode);
  HipError (*module_load_data)(HipModule* module, const void* image);
  HipError (*module_get_function)(HipFunction* function, HipModule module, const char* name);
  HipError (*module_launch_kernel)(HipFunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                   unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                                   HipStream, void** arguments, void** extra);
  HipError (*module_occupancy)(int* blocks, HipFunction function, int threads, std::size_t shared_bytes);
};

// The table, filled on the first call that finds a runtime. Null where there is none, and `error` says where it was
// looked for.
[[nodiscard]] const HipApi* hip_api(std::string& error);

}  // namespace flashport::hip_runtime
