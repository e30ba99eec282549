// Makes the kernels of the gated delta rule of a HIP target.
#pragma once

#include "common/device/gated_delta/chunk_kernel.h"
#include "common/device/gated_delta/prepare_kernel.h"
#include "common/device/gated_delta/update_kernel.h"
#include "hip/arch/define_kernel.h"

namespace flashport::FLASHPORT_TARGET::gated_delta {

template <GatedDeltaConfig kCfg>
FLASHPORT_DEVICE void gated_delta_update_wave(const GatedDeltaUpdateParams& p) {
  const Block block(nullptr, kCfg.tuning.waves);
  const std::int64_t heads = std::int64_t{p.batch} * static_cast<int>(p.by_v_heads.value);
  if (block.index() >= heads * static_cast<int>(p.by_head_slices.value))
    return;  // the last block has waves without work
  StateTileMemory<kCfg> none;
  gated_delta_update<kCfg>(p, block, state_slice<kCfg>(p, block), none);
}

}  // namespace flashport::FLASHPORT_TARGET::gated_delta

// head_dim_k, state, key_major, gate. A team is a wave: waves need nothing of each other.
#define FLASHPORT_DEFINE_GATED_DELTA_UPDATE(symbol, name, ...)                                      \
  namespace flashport::FLASHPORT_TARGET::gated_delta {                                              \
  constexpr GatedDeltaConfig symbol##_config = gated_delta_config({__VA_ARGS__});                   \
  FLASHPORT_KERNEL(symbol##_config.tuning.waves* kWaveSize, waves_per_simd(symbol##_config.tuning)) \
  void symbol(const GatedDeltaUpdateParams) {                                                       \
    gated_delta_update_wave<symbol##_config>(kernel_params<GatedDeltaUpdateParams>());              \
  }                                                                                                 \
  }

// math, head_dim_k
#define FLASHPORT_DEFINE_GATED_DELTA_PREPARE(symbol, name, ...)                                       \
  namespace flashport::FLASHPORT_TARGET::gated_delta {                                                \
  constexpr GatedDeltaChunkConfig symbol##_config{__VA_ARGS__};                                       \
  FLASHPORT_KERNEL(kPrepareThreads, 1)                                                                \
  void symbol(const GatedDeltaChunkParams) {                                                          \
    __shared__ alignas(128) unsigned char memory[sizeof(PrepareShared<symbol##_config>)];             \
    gated_delta_prepare<symbol##_config>(kernel_params<GatedDeltaChunkParams>(), Block(nullptr),      \
                                         *reinterpret_cast<PrepareShared<symbol##_config>*>(memory)); \
  }                                                                                                   \
  }

#define FLASHPORT_DEFINE_GATED_DELTA_CHUNK(symbol, name, ...)                                                 \
  namespace flashport::FLASHPORT_TARGET::gated_delta {                                                        \
  constexpr GatedDeltaChunkConfig symbol##_config{__VA_ARGS__};                                               \
  FLASHPORT_KERNEL(chain_threads(symbol##_config.head_dim_k), 1)                                              \
  void symbol(const GatedDeltaChunkParams) {                                                                  \
    __shared__ alignas(128) unsigned char memory[sizeof(ChainMemory<symbol##_config>)];                       \
    gated_delta_chunk<DeltaTiles<symbol##_config>>(kernel_params<GatedDeltaChunkParams>(), Block(nullptr),    \
                                                   *reinterpret_cast<ChainMemory<symbol##_config>*>(memory)); \
  }                                                                                                           \
  }
