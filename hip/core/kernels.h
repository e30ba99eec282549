// Makes the streaming read of a HIP target.
#pragma once

#include "common/device/core/read_kernel.h"
#include "hip/arch/define_kernel.h"

#define FLASHPORT_DEFINE_READ_BANDWIDTH(symbol, name)                                    \
  namespace flashport::FLASHPORT_TARGET {                                                \
  FLASHPORT_KERNEL(kMergeThreads, 1) void symbol(const ReadBandwidthParams) {            \
    read_bandwidth<kMergeThreads>(kernel_params<ReadBandwidthParams>(), Block(nullptr)); \
  }                                                                                      \
  }
