// Makes the kernels of a HIP target that write to caches.
#pragma once

#include "common/device/kv/append_rotary_kernel.h"
#include "common/device/kv/quantize_kernel.h"
#include "hip/arch/define_kernel.h"

#define FLASHPORT_DEFINE_APPEND_KV(symbol, name)                                     \
  namespace flashport::FLASHPORT_TARGET::kv {                                        \
  FLASHPORT_KERNEL(kAppendThreads, 1) void symbol(const AppendParams) {              \
    append_kv<kAppendThreads, false>(kernel_params<AppendParams>(), Block(nullptr)); \
  }                                                                                  \
  }

#define FLASHPORT_DEFINE_APPEND_ANY(symbol, name)                                   \
  namespace flashport::FLASHPORT_TARGET::kv {                                       \
  FLASHPORT_KERNEL(kAppendThreads, 1) void symbol(const AppendParams) {             \
    append_kv<kAppendThreads, true>(kernel_params<AppendParams>(), Block(nullptr)); \
  }                                                                                 \
  }

#define FLASHPORT_DEFINE_APPEND_ROTARY(symbol, name)                                    \
  namespace flashport::FLASHPORT_TARGET::kv {                                           \
  FLASHPORT_KERNEL(kAppendThreads, 1) void symbol(const AppendRotaryParams) {           \
    append_rotary<kAppendThreads>(kernel_params<AppendRotaryParams>(), Block(nullptr)); \
  }                                                                                     \
  }

#define FLASHPORT_DEFINE_QUANTIZE_KV(symbol, name)                                \
  namespace flashport::FLASHPORT_TARGET::kv {                                     \
  FLASHPORT_KERNEL(kAppendThreads, 1) void symbol(const QuantizeParams) {         \
    quantize_kv<kAppendThreads>(kernel_params<QuantizeParams>(), Block(nullptr)); \
  }                                                                               \
  }

#define FLASHPORT_DEFINE_DEQUANTIZE_KV(symbol, name)                                \
  namespace flashport::FLASHPORT_TARGET::kv {                                       \
  FLASHPORT_KERNEL(kAppendThreads, 1) void symbol(const QuantizeParams) {           \
    dequantize_kv<kAppendThreads>(kernel_params<QuantizeParams>(), Block(nullptr)); \
  }                                                                                 \
  }
