// Makes the streaming read of a CPU target.
#pragma once

#include "common/device/core/read_kernel.h"
#include "cpu/arch/define_kernel.h"

#define FLASHPORT_DEFINE_READ_BANDWIDTH(symbol, name)                                         \
  namespace flashport::FLASHPORT_TARGET {                                                     \
  FLASHPORT_DEFINE_KERNEL(symbol, name, KernelTag::kReadBandwidth, ReadBandwidthParams, char, \
                          read_bandwidth<1>(params, block))                                   \
  }
