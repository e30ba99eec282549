// Makes the attention kernels of a CPU target.
#pragma once

#include "common/device/attention/dropout_mask_kernel.h"
#include "common/device/attention/kernel.h"
#include "common/device/attention/merge_pieces_kernel.h"
#include "cpu/arch/define_kernel.h"
#include FLASHPORT_ATTENTION_TILES_HEADER
#include FLASHPORT_ATTENTION_TUNING_HEADER

namespace flashport::FLASHPORT_TARGET::attention {

constexpr AttentionConfig attention_config(const AttentionShape& shape) { return {shape, attention_tuning(shape)}; }

template <AttentionConfig kCfg>
FLASHPORT_DEVICE void attention(const AttentionParams& p, const Block& block,
                                typename AttentionTiles<kCfg>::Memory& memory) {
  TileScheduler<kCfg.tuning.rows, kCfg.tuning.keys> scheduler(p, block);
  AttentionTiles<kCfg> tiles(p, memory);
  for (std::int64_t i = block.index(); i < scheduler.count(); i += block.count()) {
    WorkTile work;
    scheduler.tile(static_cast<int>(i), work);
    attend(p, tiles, work);
  }
}

}  // namespace flashport::FLASHPORT_TARGET::attention

// math, head_dim_qk, head_dim_v, form, sources
#define FLASHPORT_DEFINE_ATTENTION(symbol, name, ...)                                                                 \
  namespace flashport::FLASHPORT_TARGET::attention {                                                                  \
  constexpr AttentionConfig symbol##_config = attention_config({__VA_ARGS__});                                        \
  FLASHPORT_DEFINE_KERNEL(symbol, name, KernelTag::kAttention, AttentionParams,                                       \
                          AttentionTiles<symbol##_config>::Memory, attention<symbol##_config>(params, block, shared), \
                          .attention = symbol##_config)                                                               \
  }

#define FLASHPORT_DEFINE_ATTENTION_MERGE(symbol, name)                                                      \
  namespace flashport::FLASHPORT_TARGET::attention {                                                        \
  FLASHPORT_DEFINE_KERNEL(symbol, name, KernelTag::kAttentionMerge, AttentionParams, merge::MergeShared<1>, \
                          merge_pieces<1>(params, block, shared))                                           \
  }

#define FLASHPORT_DEFINE_DROPOUT_MASK(symbol, name)                                       \
  namespace flashport::FLASHPORT_TARGET::attention {                                      \
  FLASHPORT_DEFINE_KERNEL(symbol, name, KernelTag::kDropoutMask, DropoutMaskParams, char, \
                          write_dropout_mask(params, block))                              \
  }
