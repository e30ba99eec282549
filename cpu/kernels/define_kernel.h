// Makes a kernel of a CPU target out of the algorithm in common/device. Each macro defines the function `symbol`, a
// cpu_runtime::Kernel, and its KernelEntry `<symbol>_entry` for the generated kernel table: data and no code, as the
// table is read on processors that cannot run the target.
#pragma once

#include "common/device/append_kernel.h"
#include "common/device/decode_kernel.h"
#include "common/device/gated_delta_chunk_kernel.h"
#include "common/device/gated_delta_prepare_kernel.h"
#include "common/device/gated_delta_update_kernel.h"
#include "common/device/merge_kernel.h"
#include "common/device/read_kernel.h"
#include "common/host/backend_abi.h"

namespace flashport::FLASHPORT_TARGET {

constexpr DecodeConfig decode_config(MathType math, KvFormat kv, int head_dim_qk, int head_dim_v, int rows) {
  const DecodeShape shape{head_dim_qk, head_dim_v, rows, math, kv};
  return {shape, decode_tuning(shape)};
}
constexpr GatedDeltaConfig gated_delta_config(const GatedDeltaShape& shape) {
  return {shape, gated_delta_tuning(shape)};
}

}  // namespace flashport::FLASHPORT_TARGET

#define FLASHPORT_DEFINE_KERNEL(symbol, key, shape, delta, Params, Shared, call)                    \
  extern "C" void symbol(const void* data, std::int64_t index, std::int64_t count, void* scratch) { \
    const auto& params = *static_cast<const Params*>(data);                                         \
    const Block block(index, count);                                                                \
    [[maybe_unused]] auto& shared = *static_cast<Shared*>(scratch);                                 \
    call;                                                                                           \
  }                                                                                                 \
  extern "C" const KernelEntry symbol##_entry;                                                      \
  const KernelEntry symbol##_entry = {                                                              \
      key, shape, 1, static_cast<int>(sizeof(Shared)), reinterpret_cast<const void*>(&symbol), 1, delta};

// math, kv, head_dim_qk, head_dim_v, rows
#define FLASHPORT_DEFINE_DECODE(symbol, key, ...)                                                              \
  namespace flashport::FLASHPORT_TARGET {                                                                      \
  constexpr DecodeConfig symbol##_config = decode_config(__VA_ARGS__);                                         \
  FLASHPORT_DEFINE_KERNEL(symbol, key, symbol##_config.shape, {}, DecodeParams, DecodeShared<symbol##_config>, \
                          decode<symbol##_config>(params, block_range(params, block), block, shared))          \
  }

#define FLASHPORT_DEFINE_DECODE_STAGE2(symbol, key)                                                                   \
  namespace flashport::FLASHPORT_TARGET {                                                                             \
  FLASHPORT_DEFINE_KERNEL(symbol, key, {}, {}, Stage2Params, MergeShared<1>, decode_stage2<1>(params, block, shared)) \
  }

#define FLASHPORT_DEFINE_MERGE_STATES(symbol, key)                                \
  namespace flashport::FLASHPORT_TARGET {                                         \
  FLASHPORT_DEFINE_KERNEL(symbol, key, {}, {}, MergeStatesParams, MergeShared<1>, \
                          merge_states<1>(params, block, shared))                 \
  }

#define FLASHPORT_DEFINE_APPEND_KV(symbol, key)                                                 \
  namespace flashport::FLASHPORT_TARGET {                                                       \
  FLASHPORT_DEFINE_KERNEL(symbol, key, {}, {}, AppendParams, char, append_kv<1>(params, block)) \
  }

#define FLASHPORT_DEFINE_READ_BANDWIDTH(symbol, key)                                                        \
  namespace flashport::FLASHPORT_TARGET {                                                                   \
  FLASHPORT_DEFINE_KERNEL(symbol, key, {}, {}, ReadBandwidthParams, char, read_bandwidth<1>(params, block)) \
  }

// head_dim_k, state, key_major, gate
#define FLASHPORT_DEFINE_GATED_DELTA_UPDATE(symbol, key, ...)                                                         \
  namespace flashport::FLASHPORT_TARGET {                                                                             \
  constexpr GatedDeltaConfig symbol##_config = gated_delta_config({__VA_ARGS__});                                     \
  FLASHPORT_DEFINE_KERNEL(symbol, key, {}, symbol##_config, GatedDeltaUpdateParams, StateTileMemory<symbol##_config>, \
                          gated_delta_update<symbol##_config>(params, block,                                          \
                                                              state_slice<symbol##_config>(params, block), shared))   \
  }

// math, head_dim_k
#define FLASHPORT_DEFINE_GATED_DELTA_PREPARE(symbol, key, ...)                                                         \
  namespace flashport::FLASHPORT_TARGET {                                                                              \
  constexpr GatedDeltaChunkConfig symbol##_config = {__VA_ARGS__};                                                     \
  FLASHPORT_DEFINE_KERNEL(symbol, key, gated_delta_chunk_shape(symbol##_config), {}, GatedDeltaChunkParams,            \
                          PrepareShared<symbol##_config>, gated_delta_prepare<symbol##_config>(params, block, shared)) \
  }

#define FLASHPORT_DEFINE_GATED_DELTA_CHUNK(symbol, key, ...)                                                \
  namespace flashport::FLASHPORT_TARGET {                                                                   \
  constexpr GatedDeltaChunkConfig symbol##_config = {__VA_ARGS__};                                          \
  FLASHPORT_DEFINE_KERNEL(symbol, key, gated_delta_chunk_shape(symbol##_config), {}, GatedDeltaChunkParams, \
                          ChainMemory<symbol##_config>,                                                     \
                          gated_delta_chunk<DeltaTiles<symbol##_config>>(params, block, shared))            \
  }
