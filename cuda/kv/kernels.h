// Makes the kernels of a CUDA target that write to caches.
#pragma once

#include "common/device/kv/append_rotary_kernel.h"
#include "common/device/kv/quantize_kernel.h"
#include "cuda/arch/define_kernel.h"

namespace flashport::FLASHPORT_TARGET::kv {

inline constexpr int kAppendThreads = 128;

}  // namespace flashport::FLASHPORT_TARGET::kv

#define FLASHPORT_DEFINE_APPEND_KV(symbol, name)                                                                     \
  namespace flashport::FLASHPORT_TARGET::kv {                                                                        \
  extern "C" __global__ void __launch_bounds__(kAppendThreads) symbol(const __grid_constant__ AppendParams params) { \
    begin_kernel();                                                                                                  \
    append_kv<kAppendThreads, false>(params, Block(nullptr));                                                        \
  }                                                                                                                  \
  FLASHPORT_DEFINE_ENTRY(symbol, name, KernelTag::kAppendKv, kAppendThreads, 0)                                      \
  }

#define FLASHPORT_DEFINE_APPEND_ANY(symbol, name)                                                                    \
  namespace flashport::FLASHPORT_TARGET::kv {                                                                        \
  extern "C" __global__ void __launch_bounds__(kAppendThreads) symbol(const __grid_constant__ AppendParams params) { \
    begin_kernel();                                                                                                  \
    append_kv<kAppendThreads, true>(params, Block(nullptr));                                                         \
  }                                                                                                                  \
  FLASHPORT_DEFINE_ENTRY(symbol, name, KernelTag::kAppendAny, kAppendThreads, 0)                                     \
  }

#define FLASHPORT_DEFINE_APPEND_ROTARY(symbol, name)                                \
  namespace flashport::FLASHPORT_TARGET::kv {                                       \
  extern "C" __global__ void __launch_bounds__(kAppendThreads)                      \
      symbol(const __grid_constant__ AppendRotaryParams params) {                   \
    begin_kernel();                                                                 \
    append_rotary<kAppendThreads>(params, Block(nullptr));                          \
  }                                                                                 \
  FLASHPORT_DEFINE_ENTRY(symbol, name, KernelTag::kAppendRotary, kAppendThreads, 0) \
  }

#define FLASHPORT_DEFINE_QUANTIZE_KV(symbol, name)                                                                     \
  namespace flashport::FLASHPORT_TARGET::kv {                                                                          \
  extern "C" __global__ void __launch_bounds__(kAppendThreads) symbol(const __grid_constant__ QuantizeParams params) { \
    begin_kernel();                                                                                                    \
    quantize_kv<kAppendThreads>(params, Block(nullptr));                                                               \
  }                                                                                                                    \
  FLASHPORT_DEFINE_ENTRY(symbol, name, KernelTag::kQuantizeKv, kAppendThreads, 0)                                      \
  }

#define FLASHPORT_DEFINE_DEQUANTIZE_KV(symbol, name)                                                                   \
  namespace flashport::FLASHPORT_TARGET::kv {                                                                          \
  extern "C" __global__ void __launch_bounds__(kAppendThreads) symbol(const __grid_constant__ QuantizeParams params) { \
    begin_kernel();                                                                                                    \
    dequantize_kv<kAppendThreads>(params, Block(nullptr));                                                             \
  }                                                                                                                    \
  FLASHPORT_DEFINE_ENTRY(symbol, name, KernelTag::kDequantizeKv, kAppendThreads, 0)                                    \
  }
