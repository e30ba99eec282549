// Makes a kernel of a HIP target out of the algorithm in common/device: each macro defines the __global__ function
// `symbol`. Compiled for the device alone; hip/kernels/kernel_entry.h is the host's side of it.
#pragma once

#include <hip/hip_runtime.h>

#include "common/device/append_kernel.h"
#include "common/device/decode_kernel.h"
#include "common/device/gated_delta_chunk_kernel.h"
#include "common/device/gated_delta_prepare_kernel.h"
#include "common/device/gated_delta_update_kernel.h"
#include "common/device/merge_kernel.h"
#include "common/device/read_kernel.h"

namespace flashport::FLASHPORT_TARGET {

constexpr DecodeConfig decode_config(MathType math, KvFormat kv, int head_dim_qk, int head_dim_v, int rows) {
  const DecodeShape shape{head_dim_qk, head_dim_v, rows, math, kv};
  return {shape, decode_tuning(shape)};
}

constexpr GatedDeltaConfig gated_delta_config(const GatedDeltaShape& shape) {
  return {shape, gated_delta_tuning(shape)};
}

template <GatedDeltaConfig kCfg>
FLASHPORT_DEVICE void gated_delta_update_wave(const GatedDeltaUpdateParams& p) {
  const Block block(nullptr, kCfg.tuning.waves);
  const std::int64_t heads = std::int64_t{p.batch} * static_cast<int>(p.by_v_heads.value);
  if (block.index() >= heads * static_cast<int>(p.by_slices_of_head.value)) return;  // of the last block
  StateTileMemory<kCfg> none;
  gated_delta_update<kCfg>(p, block, state_slice<kCfg>(p, block), none);
}

// A multiprocessor (a CU of CDNA, a work-group processor of RDNA) has four SIMDs.
template <class Tuning>
constexpr int waves_per_simd(const Tuning& tuning) {
  return (tuning.waves * tuning.blocks_per_multiprocessor + 3) / 4;
}

}  // namespace flashport::FLASHPORT_TARGET

#define FLASHPORT_KERNEL(threads, waves_per_simd) \
  extern "C" __attribute__((global, amdgpu_flat_work_group_size(threads, threads), amdgpu_waves_per_eu(waves_per_simd)))

// math, kv, head_dim_qk, head_dim_v, rows
#define FLASHPORT_DEFINE_DECODE(symbol, key, ...)                                          \
  namespace flashport::FLASHPORT_TARGET {                                                  \
  constexpr DecodeConfig symbol##_config = decode_config(__VA_ARGS__);                     \
  FLASHPORT_KERNEL(block_threads(symbol##_config), waves_per_simd(symbol##_config.tuning)) \
  void symbol(const DecodeParams) {                                                        \
    __shared__ alignas(128) unsigned char memory[sizeof(DecodeShared<symbol##_config>)];   \
    auto& shared = *reinterpret_cast<DecodeShared<symbol##_config>*>(memory);              \
    const DecodeParams& params = kernel_params<DecodeParams>();                            \
    const Block block(&shared.arrive_flag);                                                \
    decode<symbol##_config>(params, block_range(params, block), block, shared);            \
  }                                                                                        \
  }

// head_dim_k, state, key_major, gate. A team is a wave, which works alone.
#define FLASHPORT_DEFINE_GATED_DELTA_UPDATE(symbol, key, ...)                                       \
  namespace flashport::FLASHPORT_TARGET {                                                           \
  constexpr GatedDeltaConfig symbol##_config = gated_delta_config({__VA_ARGS__});                   \
  FLASHPORT_KERNEL(symbol##_config.tuning.waves* kWaveSize, waves_per_simd(symbol##_config.tuning)) \
  void symbol(const GatedDeltaUpdateParams) {                                                       \
    gated_delta_update_wave<symbol##_config>(kernel_params<GatedDeltaUpdateParams>());              \
  }                                                                                                 \
  }

// math, head_dim_k
#define FLASHPORT_DEFINE_GATED_DELTA_PREPARE(symbol, key, ...)                                        \
  namespace flashport::FLASHPORT_TARGET {                                                             \
  constexpr GatedDeltaChunkConfig symbol##_config{__VA_ARGS__};                                       \
  FLASHPORT_KERNEL(kPrepareThreads, 1)                                                                \
  void symbol(const GatedDeltaChunkParams) {                                                          \
    __shared__ alignas(128) unsigned char memory[sizeof(PrepareShared<symbol##_config>)];             \
    gated_delta_prepare<symbol##_config>(kernel_params<GatedDeltaChunkParams>(), Block(nullptr),      \
                                         *reinterpret_cast<PrepareShared<symbol##_config>*>(memory)); \
  }                                                                                                   \
  }
#define FLASHPORT_DEFINE_GATED_DELTA_CHUNK(symbol, key, ...)                                                  \
  namespace flashport::FLASHPORT_TARGET {                                                                     \
  constexpr GatedDeltaChunkConfig symbol##_config{__VA_ARGS__};                                               \
  FLASHPORT_KERNEL(chain_threads(symbol##_config.head_dim_k), 1)                                              \
  void symbol(const GatedDeltaChunkParams) {                                                                  \
    __shared__ alignas(128) unsigned char memory[sizeof(ChainMemory<symbol##_config>)];                       \
    gated_delta_chunk<DeltaTiles<symbol##_config>>(kernel_params<GatedDeltaChunkParams>(), Block(nullptr),    \
                                                   *reinterpret_cast<ChainMemory<symbol##_config>*>(memory)); \
  }                                                                                                           \
  }

#define FLASHPORT_DEFINE_MERGE(symbol, Params, body)                                  \
  namespace flashport::FLASHPORT_TARGET {                                             \
  FLASHPORT_KERNEL(kMergeThreads, 1) void symbol(const Params) {                      \
    __shared__ alignas(128) unsigned char memory[sizeof(MergeShared<kMergeThreads>)]; \
    body<kMergeThreads>(kernel_params<Params>(), Block(nullptr),                      \
                        *reinterpret_cast<MergeShared<kMergeThreads>*>(memory));      \
  }                                                                                   \
  }
#define FLASHPORT_DEFINE_DECODE_STAGE2(symbol, key) FLASHPORT_DEFINE_MERGE(symbol, Stage2Params, decode_stage2)
#define FLASHPORT_DEFINE_MERGE_STATES(symbol, key) FLASHPORT_DEFINE_MERGE(symbol, MergeStatesParams, merge_states)

#define FLASHPORT_DEFINE_APPEND_KV(symbol, key)                               \
  namespace flashport::FLASHPORT_TARGET {                                     \
  FLASHPORT_KERNEL(kAppendThreads, 1) void symbol(const AppendParams) {       \
    append_kv<kAppendThreads>(kernel_params<AppendParams>(), Block(nullptr)); \
  }                                                                           \
  }

#define FLASHPORT_DEFINE_READ_BANDWIDTH(symbol, key)                                     \
  namespace flashport::FLASHPORT_TARGET {                                                \
  FLASHPORT_KERNEL(kMergeThreads, 1) void symbol(const ReadBandwidthParams) {            \
    read_bandwidth<kMergeThreads>(kernel_params<ReadBandwidthParams>(), Block(nullptr)); \
  }                                                                                      \
  }
