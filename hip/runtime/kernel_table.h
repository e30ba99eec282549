// The kernels that this build of the HIP backend holds; defined by the generated kernel_table.cpp.
#pragma once

#include <span>

#include "common/host/kernel_table.h"

namespace flashport::hip_runtime {

// One element per target, in the order of cmake/targets.cmake.
std::span<const TargetKernels> kernel_tables();

}  // namespace flashport::hip_runtime
