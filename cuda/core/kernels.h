// Makes the streaming read of a CUDA target.
#pragma once

#include "common/device/core/read_kernel.h"
#include "cuda/arch/define_kernel.h"

namespace flashport::FLASHPORT_TARGET {

inline constexpr int kReadThreads = 128;

}  // namespace flashport::FLASHPORT_TARGET

#define FLASHPORT_DEFINE_READ_BANDWIDTH(symbol, name)                              \
  namespace flashport::FLASHPORT_TARGET {                                          \
  extern "C" __global__ void __launch_bounds__(kReadThreads)                       \
      symbol(const __grid_constant__ ReadBandwidthParams params) {                 \
    begin_kernel();                                                                \
    read_bandwidth<kReadThreads>(params, Block(nullptr));                          \
  }                                                                                \
  FLASHPORT_DEFINE_ENTRY(symbol, name, KernelTag::kReadBandwidth, kReadThreads, 0) \
  }
