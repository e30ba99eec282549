// Makes the kernels of a CUDA target that merge partial results.
#pragma once

#include "common/device/merge/merge_kernel.h"
#include "cuda/arch/define_kernel.h"

namespace flashport::FLASHPORT_TARGET::merge {

inline constexpr int kMergeThreads = 128;

}  // namespace flashport::FLASHPORT_TARGET::merge

#define FLASHPORT_DEFINE_MERGE(symbol, name, its_tag, Params, body)                                           \
  namespace flashport::FLASHPORT_TARGET::merge {                                                              \
  extern "C" __global__ void __launch_bounds__(kMergeThreads) symbol(const __grid_constant__ Params params) { \
    __shared__ MergeShared<kMergeThreads> shared;                                                             \
    begin_kernel();                                                                                           \
    body<kMergeThreads>(params, Block(nullptr), shared);                                                      \
  }                                                                                                           \
  FLASHPORT_DEFINE_ENTRY(symbol, name, its_tag, kMergeThreads, 0)                                             \
  }
#define FLASHPORT_DEFINE_DECODE_STAGE2(symbol, name) \
  FLASHPORT_DEFINE_MERGE(symbol, name, KernelTag::kDecodeStage2, Stage2Params, decode_stage2)
#define FLASHPORT_DEFINE_MERGE_STATES(symbol, name) \
  FLASHPORT_DEFINE_MERGE(symbol, name, KernelTag::kMergeStates, MergeStatesParams, merge_states)
