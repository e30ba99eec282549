// The backends of this process. The CPU's is built in; a GPU's is a shared object, opened at its first use from
// FLASHPORT_BACKEND_PATH (folders, separated by ':') or else from the folder of this library, and never closed.
#pragma once

#include <string>

#include "common/host/backend_abi.h"

namespace flashport {

// The backend that is built in.
[[nodiscard]] const BackendAbi* cpu_backend();

struct LoadedBackend {
  const BackendAbi* abi = nullptr;
  std::string detail;  // the file it was opened from, or why there is none
};

// Opens the backend at the first call; every thread sees the same result.
[[nodiscard]] const LoadedBackend& load_backend(DeviceKind kind);
[[nodiscard]] const char* backend_name(DeviceKind kind);
inline constexpr DeviceKind kAllKinds[] = {DeviceKind::kCpu, DeviceKind::kCuda, DeviceKind::kHip};

// For tests of the host side: `abi` replaces a backend, null restores the real one. Forgets what is known of
// devices; no other call may run meanwhile.
void replace_backend_for_test(DeviceKind kind, const BackendAbi* abi);

}  // namespace flashport
