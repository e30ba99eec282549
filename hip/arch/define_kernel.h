// How a kernel of a HIP target is declared, for the kernels.h of each operation, whose macros define the __global__
// function `symbol`. Compiled for the device alone; hip/runtime/kernel_entry.h is the host's side of it.
#pragma once

#include <hip/hip_runtime.h>

#include FLASHPORT_TARGET_HEADER

namespace flashport::FLASHPORT_TARGET {

// A multiprocessor (a CU of CDNA, a work-group processor of RDNA) has four SIMDs.
template <class Tuning>
constexpr int waves_per_simd(const Tuning& tuning) {
  return (tuning.waves * tuning.blocks_per_multiprocessor + 3) / 4;
}

}  // namespace flashport::FLASHPORT_TARGET

#define FLASHPORT_KERNEL(threads, waves_per_simd) \
  extern "C" __attribute__((global, amdgpu_flat_work_group_size(threads, threads), amdgpu_waves_per_eu(waves_per_simd)))
