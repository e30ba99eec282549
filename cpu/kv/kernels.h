// Makes the kernels of a CPU target that write to caches.
#pragma once

#include "common/device/kv/append_rotary_kernel.h"
#include "common/device/kv/quantize_kernel.h"
#include "cpu/arch/define_kernel.h"

#define FLASHPORT_DEFINE_APPEND_KV(symbol, name)                                  \
  namespace flashport::FLASHPORT_TARGET::kv {                                     \
  FLASHPORT_DEFINE_KERNEL(symbol, name, KernelTag::kAppendKv, AppendParams, char, \
                          (append_kv<1, false>(params, block)))                   \
  }

#define FLASHPORT_DEFINE_APPEND_ANY(symbol, name)                                  \
  namespace flashport::FLASHPORT_TARGET::kv {                                      \
  FLASHPORT_DEFINE_KERNEL(symbol, name, KernelTag::kAppendAny, AppendParams, char, \
                          (append_kv<1, true>(params, block)))                     \
  }

#define FLASHPORT_DEFINE_APPEND_ROTARY(symbol, name)                                        \
  namespace flashport::FLASHPORT_TARGET::kv {                                               \
  FLASHPORT_DEFINE_KERNEL(symbol, name, KernelTag::kAppendRotary, AppendRotaryParams, char, \
                          append_rotary<1>(params, block))                                  \
  }

#define FLASHPORT_DEFINE_QUANTIZE_KV(symbol, name)                                                                   \
  namespace flashport::FLASHPORT_TARGET::kv {                                                                        \
  FLASHPORT_DEFINE_KERNEL(symbol, name, KernelTag::kQuantizeKv, QuantizeParams, char, quantize_kv<1>(params, block)) \
  }

#define FLASHPORT_DEFINE_DEQUANTIZE_KV(symbol, name)                                    \
  namespace flashport::FLASHPORT_TARGET::kv {                                           \
  FLASHPORT_DEFINE_KERNEL(symbol, name, KernelTag::kDequantizeKv, QuantizeParams, char, \
                          dequantize_kv<1>(params, block))                              \
  }
