// The backend under test, with the probe kernels instead of its own.
#pragma once

#include "common/host/backend_abi.h"

namespace flashport {

const BackendAbi* probe_backend();

}  // namespace flashport
