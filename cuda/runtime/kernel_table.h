// The kernels that this build of the CUDA backend holds; defined by the generated kernel_table.cpp.
#pragma once

#include <span>

#include "common/host/kernel_table.h"

namespace flashport::cuda_runtime {

// One element per target, in the order of cmake/targets.cmake.
std::span<const TargetKernels> kernel_tables();

}  // namespace flashport::cuda_runtime
