// Makes the attention kernels of a HIP target.
#pragma once

#include "common/device/attention/dropout_mask_kernel.h"
#include "common/device/attention/merge_pieces_kernel.h"
#include "hip/arch/define_kernel.h"
#include FLASHPORT_ATTENTION_TUNING_HEADER
#include FLASHPORT_ATTENTION_TILES_HEADER

namespace flashport::FLASHPORT_TARGET::attention {

constexpr AttentionConfig attention_config(MathType math, int head_dim_qk, int head_dim_v, ScoreForm form,
                                           KeySources sources) {
  const AttentionShape shape{math, head_dim_qk, head_dim_v, form, sources};
  return {shape, attention_tuning(shape)};
}

// Blocks are as many as there may be work tiles, unless a test limits them; the hardware starts them in this order.
template <AttentionConfig kCfg>
FLASHPORT_DEVICE void attention_block(const AttentionParams& p, AttentionMemory<kCfg>& memory) {
  const Block block(nullptr);
  TileScheduler<kCfg.tuning.rows, kCfg.tuning.keys> scheduler(p, block);
  const int count = scheduler.count();
  AttentionTiles<kCfg> tiles(p, block, memory);
  for (std::int64_t i = block.index(); i < count; i += block.count()) {
    WorkTile own;
    scheduler.tile(static_cast<int>(i), own);
    const WorkTile work = block.uniform(own);
    tiles.take(work);
    attend(p, tiles, work);
  }
}

}  // namespace flashport::FLASHPORT_TARGET::attention

// math, head_dim_qk, head_dim_v, form, sources
#define FLASHPORT_DEFINE_ATTENTION(symbol, name, ...)                                                                  \
  namespace flashport::FLASHPORT_TARGET::attention {                                                                   \
  constexpr AttentionConfig symbol##_config = attention_config(__VA_ARGS__);                                           \
  FLASHPORT_KERNEL(attention_threads(symbol##_config.shape), attention_threads(symbol##_config.shape) / kWaveSize / 4) \
  void symbol(const AttentionParams) {                                                                                 \
    __shared__ alignas(128) unsigned char memory[sizeof(AttentionMemory<symbol##_config>)];                            \
    attention_block<symbol##_config>(kernel_params<AttentionParams>(),                                                 \
                                     *reinterpret_cast<AttentionMemory<symbol##_config>*>(memory));                    \
  }                                                                                                                    \
  }

#define FLASHPORT_DEFINE_ATTENTION_MERGE(symbol, name)                                                                 \
  namespace flashport::FLASHPORT_TARGET::attention {                                                                   \
  FLASHPORT_KERNEL(kMergeThreads, 1) void symbol(const AttentionParams) {                                              \
    using Shared = merge::MergeShared<kMergeThreads>;                                                                  \
    __shared__ alignas(128) unsigned char memory[sizeof(Shared)];                                                      \
    merge_pieces<kMergeThreads>(kernel_params<AttentionParams>(), Block(nullptr), *reinterpret_cast<Shared*>(memory)); \
  }                                                                                                                    \
  }

#define FLASHPORT_DEFINE_DROPOUT_MASK(symbol, name)                               \
  namespace flashport::FLASHPORT_TARGET::attention {                              \
  FLASHPORT_KERNEL(kDropoutMaskThreads, 1) void symbol(const DropoutMaskParams) { \
    write_dropout_mask(kernel_params<DropoutMaskParams>(), Block(nullptr));       \
  }                                                                               \
  }
