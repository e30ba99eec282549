// Makes the kernels of the gated delta rule of a CPU target.
#pragma once

#include "common/device/gated_delta/chunk_kernel.h"
#include "common/device/gated_delta/prepare_kernel.h"
#include "common/device/gated_delta/update_kernel.h"
#include "cpu/arch/define_kernel.h"

// head_dim_k, state, key_major, gate
#define FLASHPORT_DEFINE_GATED_DELTA_UPDATE(symbol, name, ...)                                                      \
  namespace flashport::FLASHPORT_TARGET::gated_delta {                                                              \
  constexpr GatedDeltaConfig symbol##_config = gated_delta_config({__VA_ARGS__});                                   \
  FLASHPORT_DEFINE_KERNEL(symbol, name, KernelTag::kGatedDeltaUpdate, GatedDeltaUpdateParams,                       \
                          StateTileMemory<symbol##_config>,                                                         \
                          gated_delta_update<symbol##_config>(params, block,                                        \
                                                              state_slice<symbol##_config>(params, block), shared), \
                          .gated_delta_update = symbol##_config)                                                    \
  }

// math, head_dim_k
#define FLASHPORT_DEFINE_GATED_DELTA_PREPARE(symbol, name, ...)                                                        \
  namespace flashport::FLASHPORT_TARGET::gated_delta {                                                                 \
  constexpr GatedDeltaChunkConfig symbol##_config = {__VA_ARGS__};                                                     \
  FLASHPORT_DEFINE_KERNEL(symbol, name, KernelTag::kGatedDeltaPrepare, GatedDeltaChunkParams,                          \
                          PrepareShared<symbol##_config>, gated_delta_prepare<symbol##_config>(params, block, shared), \
                          .gated_delta_chunk = symbol##_config)                                                        \
  }

#define FLASHPORT_DEFINE_GATED_DELTA_CHUNK(symbol, name, ...)                                    \
  namespace flashport::FLASHPORT_TARGET::gated_delta {                                           \
  constexpr GatedDeltaChunkConfig symbol##_config = {__VA_ARGS__};                               \
  FLASHPORT_DEFINE_KERNEL(symbol, name, KernelTag::kGatedDeltaChunk, GatedDeltaChunkParams,      \
                          ChainMemory<symbol##_config>,                                          \
                          gated_delta_chunk<DeltaTiles<symbol##_config>>(params, block, shared), \
                          .gated_delta_chunk = symbol##_config)                                  \
  }
