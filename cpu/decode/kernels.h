// Makes decode kernels of a CPU target.
#pragma once

#include "common/device/decode/kernel.h"
#include "cpu/arch/define_kernel.h"

// math, k_format, v_format, head_dim_qk, head_dim_v, rows
#define FLASHPORT_DEFINE_DECODE(symbol, name, ...)                                                    \
  namespace flashport::FLASHPORT_TARGET::decode {                                                     \
  constexpr DecodeConfig symbol##_config = decode_config(__VA_ARGS__);                                \
  FLASHPORT_DEFINE_KERNEL(symbol, name, KernelTag::kDecode, DecodeParamsOf<symbol##_config>,          \
                          DecodeShared<symbol##_config>,                                              \
                          decode<symbol##_config>(params, block_range(params, block), block, shared), \
                          .decode = symbol##_config)                                                  \
  }
