// Makes the attention kernels of a CUDA target: the __global__ function `symbol` and its KernelEntry `<symbol>_entry`.
#pragma once

#include "common/device/attention/dropout_mask_kernel.h"
#include "common/device/attention/merge_pieces_kernel.h"
#include "cuda/arch/define_kernel.h"
#include "cuda/attention/producer.h"
#include "cuda/attention/tensor_maps.h"
#include "cuda/attention/tiles.h"
#include FLASHPORT_ATTENTION_TUNING_HEADER

namespace flashport::FLASHPORT_TARGET::attention {

constexpr AttentionConfig attention_config(MathType math, int head_dim_qk, int head_dim_v, ScoreForm form,
                                           KeySources sources) {
  const AttentionShape shape{math, head_dim_qk, head_dim_v, form, sources};
  return {shape, attention_tuning(shape)};
}

template <AttentionConfig kCfg>
FLASHPORT_DEVICE void attention_block(const AttentionParams& p, AttentionMemory<kCfg>& memory) {
  constexpr int kGroups = consumer_groups(kCfg.tuning);
  constexpr WarpgroupRegisters kRegisters = attention_registers(kCfg);
  constexpr int kProducers = producer_groups(kCfg), kAtStart = 512 / (kGroups + kProducers) / 8 * 8;
  static_assert(kGroups * kRegisters.consumer + kProducers * kRegisters.producer <= kAtStart * (kGroups + kProducers),
                "warpgroups would wait for registers for ever");
  if (threadIdx.x == 0) {
    memory.init(p);
    prefetch_map(&p.q_map);
    prefetch_map(&p.k_map);
    prefetch_map(&p.v_map);
    if constexpr (kCfg.shape.form == ScoreForm::kBias) prefetch_map(&p.bias_map);
  }
  if (shares_tiles<kCfg>(p)) {
    cluster_sync();  // and the barriers of both are there
  } else {
    __syncthreads();
  }
  begin_kernel();
  const int group = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  if (group >= kGroups) {
    decrease_registers<kRegisters.producer>();
    const Block block(&memory.flag, kGroups * kWarpgroup, producer_groups(kCfg) * kWarpgroup, 0);
    produce<kCfg>(p, block, memory);
  } else {
    increase_registers<kRegisters.consumer>();
    AttentionTiles<kCfg> tiles(group, memory);
    WorkTiles<kCfg> work_tiles(memory);
    while (true) {
      const WorkTile& work = work_tiles.receive();
      if (work.seq < 0) break;
      tiles.set_rows(work);
      attend(p, tiles, work);
      work_tiles.release();
    }
  }
  if (shares_tiles<kCfg>(p)) cluster_sync();  // the other's last copies and arrivals come to this block's memory
}

}  // namespace flashport::FLASHPORT_TARGET::attention

// math, head_dim_qk, head_dim_v, form, sources
#define FLASHPORT_DEFINE_ATTENTION(symbol, name, ...)                                                       \
  namespace flashport::FLASHPORT_TARGET::attention {                                                        \
  constexpr AttentionConfig symbol##_config = attention_config(__VA_ARGS__);                                \
  static_assert(sizeof(AttentionMemory<symbol##_config>) <= kMostSharedBytes);                              \
  extern "C" __global__ void __launch_bounds__(block_threads(symbol##_config), 1)                           \
      symbol(const __grid_constant__ AttentionParams params) {                                              \
    extern __shared__ __align__(1024) unsigned char memory[];                                               \
    attention_block<symbol##_config>(params, *reinterpret_cast<AttentionMemory<symbol##_config>*>(memory)); \
  }                                                                                                         \
  FLASHPORT_DEFINE_ENTRY(                                                                                   \
      symbol, name, KernelTag::kAttention, block_threads(symbol##_config),                                  \
      static_cast<int>(sizeof(AttentionMemory<symbol##_config>)), .shape = {.attention = symbol##_config},  \
      .prepare = cuda_attention::encode_maps<symbol##_config.shape.math, symbol##_config.shape.form,        \
                                             symbol##_config.tuning.rows, symbol##_config.tuning.keys,      \
                                             (stored_bytes(symbol##_config) > 0)>)                          \
  }

#define FLASHPORT_DEFINE_ATTENTION_MERGE(symbol, name)                                                  \
  namespace flashport::FLASHPORT_TARGET::attention {                                                    \
  extern "C" __global__ void __launch_bounds__(128) symbol(const __grid_constant__ AttentionParams p) { \
    __shared__ merge::MergeShared<128> shared;                                                          \
    begin_kernel();                                                                                     \
    merge_pieces<128>(p, Block(nullptr), shared);                                                       \
  }                                                                                                     \
  FLASHPORT_DEFINE_ENTRY(symbol, name, KernelTag::kAttentionMerge, 128, 0)                              \
  }

#define FLASHPORT_DEFINE_DROPOUT_MASK(symbol, name)                                                       \
  namespace flashport::FLASHPORT_TARGET::attention {                                                      \
  extern "C" __global__ void __launch_bounds__(128) symbol(const __grid_constant__ DropoutMaskParams p) { \
    begin_kernel();                                                                                       \
    write_dropout_mask(p, Block(nullptr));                                                                \
  }                                                                                                       \
  FLASHPORT_DEFINE_ENTRY(symbol, name, KernelTag::kDropoutMask, 128, 0)                                   \
  }
