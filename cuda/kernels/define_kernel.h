// Makes a kernel of a CUDA target out of the algorithm in common/device. Each macro defines the __global__ function
// `symbol` and `flashport::KernelEntry <symbol>_entry()`, which the generated kernel table calls.
#pragma once

#include "common/device/append_kernel.h"
#include "common/device/decode_kernel.h"
#include "common/device/merge_kernel.h"
#include "common/device/read_kernel.h"
#include "common/host/backend_abi.h"

namespace flashport::FLASHPORT_TARGET {

inline constexpr int kMergeThreads = 128;
inline constexpr int kAppendThreads = 128;

// The waves of a block part: the first compute, the others bring them keys and values.
template <DecodeConfig kCfg>
FLASHPORT_DEVICE void decode_block(const DecodeParams& p, DecodeShared<kCfg>& shared) {
  shared.ring.init();
  if (threadIdx.x == 0) shared.arrive_flag = touch_params(p);
  __syncthreads();
  begin_kernel();
  const Range range = block_range(p, Block(nullptr));
  constexpr int kCompute = compute_threads(kCfg);
  if (threadIdx.x < kCompute) {
    decode<kCfg>(p, range, Block(&shared.arrive_flag, 0, kCompute, 1), shared);
  } else {
    const Block producers(nullptr, kCompute, producer_threads(kCfg), 2);
    KvProducer<kCfg>(p, producers, shared.ring).run(p, range, DecodeTiles<kCfg>::kKeepsParent, shared.ends);
  }
}

constexpr DecodeConfig decode_config(MathType math, KvFormat kv, int head_dim_qk, int head_dim_v, int rows) {
  const DecodeShape shape{head_dim_qk, head_dim_v, rows, math, kv};
  return {shape, decode_tuning(shape)};
}

}  // namespace flashport::FLASHPORT_TARGET

// math, kv, head_dim_qk, head_dim_v, rows
#define FLASHPORT_DEFINE_DECODE(symbol, key, ...)                                                            \
  namespace flashport::FLASHPORT_TARGET {                                                                    \
  constexpr DecodeConfig symbol##_config = decode_config(__VA_ARGS__);                                       \
  extern "C" __global__ void __launch_bounds__(block_threads(symbol##_config),                               \
                                               symbol##_config.tuning.blocks_per_multiprocessor)             \
      symbol(const __grid_constant__ DecodeParams params) {                                                  \
    extern __shared__ __align__(128) unsigned char memory[];                                                 \
    auto& shared = *reinterpret_cast<DecodeShared<symbol##_config>*>(memory);                                \
    decode_block<symbol##_config>(params, shared);                                                           \
  }                                                                                                          \
  extern "C" KernelEntry symbol##_entry() {                                                                  \
    return {key, symbol##_config.shape, block_threads(symbol##_config),                                      \
            static_cast<int>(sizeof(DecodeShared<symbol##_config>)), reinterpret_cast<const void*>(symbol)}; \
  }                                                                                                          \
  }

#define FLASHPORT_DEFINE_MERGE(symbol, key, Params, body)                                                     \
  namespace flashport::FLASHPORT_TARGET {                                                                     \
  extern "C" __global__ void __launch_bounds__(kMergeThreads) symbol(const __grid_constant__ Params params) { \
    __shared__ MergeShared<kMergeThreads> shared;                                                             \
    begin_kernel();                                                                                           \
    body<kMergeThreads>(params, Block(nullptr), shared);                                                      \
  }                                                                                                           \
  extern "C" KernelEntry symbol##_entry() {                                                                   \
    return {key, {}, kMergeThreads, 0, reinterpret_cast<const void*>(symbol)};                                \
  }                                                                                                           \
  }
#define FLASHPORT_DEFINE_DECODE_STAGE2(symbol, key) FLASHPORT_DEFINE_MERGE(symbol, key, Stage2Params, decode_stage2)
#define FLASHPORT_DEFINE_MERGE_STATES(symbol, key) FLASHPORT_DEFINE_MERGE(symbol, key, MergeStatesParams, merge_states)

#define FLASHPORT_DEFINE_APPEND_KV(symbol, key)                                                                      \
  namespace flashport::FLASHPORT_TARGET {                                                                            \
  extern "C" __global__ void __launch_bounds__(kAppendThreads) symbol(const __grid_constant__ AppendParams params) { \
    begin_kernel();                                                                                                  \
    append_kv<kAppendThreads>(params, Block(nullptr));                                                               \
  }                                                                                                                  \
  extern "C" KernelEntry symbol##_entry() {                                                                          \
    return {key, {}, kAppendThreads, 0, reinterpret_cast<const void*>(symbol)};                                      \
  }                                                                                                                  \
  }

#define FLASHPORT_DEFINE_READ_BANDWIDTH(symbol, key)                           \
  namespace flashport::FLASHPORT_TARGET {                                      \
  extern "C" __global__ void __launch_bounds__(kMergeThreads)                  \
      symbol(const __grid_constant__ ReadBandwidthParams params) {             \
    begin_kernel();                                                            \
    read_bandwidth<kMergeThreads>(params, Block(nullptr));                     \
  }                                                                            \
  extern "C" KernelEntry symbol##_entry() {                                    \
    return {key, {}, kMergeThreads, 0, reinterpret_cast<const void*>(symbol)}; \
  }                                                                            \
  }
