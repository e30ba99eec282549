// Makes the kernel of a CPU target that writes to caches.
#pragma once

#include "common/device/kv/append_kernel.h"
#include "cpu/arch/define_kernel.h"

#define FLASHPORT_DEFINE_APPEND_KV(symbol, name)                                                               \
  namespace flashport::FLASHPORT_TARGET::kv {                                                                  \
  FLASHPORT_DEFINE_KERNEL(symbol, name, KernelTag::kAppendKv, AppendParams, char, append_kv<1>(params, block)) \
  }
