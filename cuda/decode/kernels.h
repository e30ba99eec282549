// Makes decode kernels of a CUDA target: the __global__ function `symbol` and its KernelEntry `<symbol>_entry`.
#pragma once

#include "common/device/decode/combine_kernel.h"
#include "cuda/arch/define_kernel.h"
#include "cuda/decode/team_work.h"

namespace flashport::FLASHPORT_TARGET::decode {

constexpr KernelTag decode_tag(const DecodeShape& shape) {
  if (shape.has_wide_segments) {
    return shape.large_cache ? KernelTag::kDecodeSegmentsLarge : KernelTag::kDecodeSegments;
  }
  if (shape.appends) return shape.plain ? KernelTag::kDecodeAppendPlain : KernelTag::kDecodeAppend;
  if (!shape.plain) return shape.large_cache ? KernelTag::kDecodeLarge : KernelTag::kDecode;
  return shape.large_cache ? KernelTag::kDecodePlainLarge : KernelTag::kDecodePlain;
}

}  // namespace flashport::FLASHPORT_TARGET::decode

// The next call may begin at once: it waits for this launch, which ends after the one before it.
#define FLASHPORT_DEFINE_COMBINE(symbol, name, its_tag, Params, Shared, body)                  \
  namespace flashport::FLASHPORT_TARGET::decode {                                              \
  extern "C" __global__ void __launch_bounds__(128) symbol(const __grid_constant__ Params p) { \
    __shared__ Shared shared;                                                                  \
    launch_dependents();                                                                       \
    body(p, Block(nullptr), shared, [] { await_kernel_before(); });                            \
  }                                                                                            \
  FLASHPORT_DEFINE_ENTRY(symbol, name, its_tag, 128, 0)                                        \
  }
#define FLASHPORT_DEFINE_DECODE_COMBINE(symbol, name) \
  FLASHPORT_DEFINE_COMBINE(symbol, name, KernelTag::kDecodeCombine, DecodeParams, CombineShared, decode_combine)
#define FLASHPORT_DEFINE_DECODE_APPEND_COMBINE(symbol, name)                                                 \
  FLASHPORT_DEFINE_COMBINE(symbol, name, KernelTag::kDecodeAppendCombine, AppendDecodeParams, CombineShared, \
                           decode_combine)
#define FLASHPORT_DEFINE_DECODE_PLAIN_COMBINE(symbol, name)                                                \
  FLASHPORT_DEFINE_COMBINE(symbol, name, KernelTag::kDecodePlainCombine, PlainDecodeParams, CombineShared, \
                           decode_combine)
#define FLASHPORT_DEFINE_DECODE_SEGMENTS_COMBINE(symbol, name)                                                   \
  FLASHPORT_DEFINE_COMBINE(symbol, name, KernelTag::kDecodeSegmentsCombine, SegmentsDecodeParams, CombineShared, \
                           decode_combine)

// math, k_format, v_format, head_dim_qk, head_dim_v, rows, whether it appends, is for plain calls, for large caches,
// also reads segments of 16 bits
#define FLASHPORT_DEFINE_DECODE(symbol, name, ...)                                                             \
  namespace flashport::FLASHPORT_TARGET::decode {                                                              \
  constexpr DecodeConfig symbol##_config = decode_config(__VA_ARGS__);                                         \
  extern "C" __global__ void __launch_bounds__(block_threads(symbol##_config),                                 \
                                               symbol##_config.tuning.blocks_per_multiprocessor)               \
      symbol(const __grid_constant__ DecodeParamsOf<symbol##_config> params) {                                 \
    extern __shared__ __align__(1024) unsigned char memory[];                                                  \
    decode_block<symbol##_config>(params, reinterpret_cast<DecodeShared<symbol##_config>*>(memory));           \
  }                                                                                                            \
  FLASHPORT_DEFINE_ENTRY(symbol, name, decode_tag(symbol##_config.shape), block_threads(symbol##_config),      \
                         shared_bytes<symbol##_config>(), .shape = {.decode = symbol##_config},                \
                         .teams = symbol##_config.tuning.teams, .decode_split = decode_split(symbol##_config)) \
  }
