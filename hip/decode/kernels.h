// Makes decode kernels of a HIP target.
#pragma once

#include "common/device/decode/kernel.h"
#include "hip/arch/define_kernel.h"

// math, k_format, v_format, head_dim_qk, head_dim_v, rows
#define FLASHPORT_DEFINE_DECODE(symbol, name, ...)                                         \
  namespace flashport::FLASHPORT_TARGET::decode {                                          \
  constexpr DecodeConfig symbol##_config = decode_config(__VA_ARGS__);                     \
  FLASHPORT_KERNEL(block_threads(symbol##_config), waves_per_simd(symbol##_config.tuning)) \
  void symbol(const DecodeParamsOf<symbol##_config>) {                                     \
    __shared__ alignas(128) unsigned char memory[sizeof(DecodeShared<symbol##_config>)];   \
    auto& shared = *reinterpret_cast<DecodeShared<symbol##_config>*>(memory);              \
    const auto& params = kernel_params<DecodeParamsOf<symbol##_config>>();                 \
    const Block block(&shared.arrive_flag);                                                \
    decode<symbol##_config>(params, block_range(params, block), block, shared);            \
  }                                                                                        \
  }
