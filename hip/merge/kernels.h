// Makes the kernels of a HIP target that merge partial results.
#pragma once

#include "common/device/merge/merge_kernel.h"
#include "hip/arch/define_kernel.h"

#define FLASHPORT_DEFINE_MERGE(symbol, Params, body)                                  \
  namespace flashport::FLASHPORT_TARGET::merge {                                      \
  FLASHPORT_KERNEL(kMergeThreads, 1) void symbol(const Params) {                      \
    __shared__ alignas(128) unsigned char memory[sizeof(MergeShared<kMergeThreads>)]; \
    body<kMergeThreads>(kernel_params<Params>(), Block(nullptr),                      \
                        *reinterpret_cast<MergeShared<kMergeThreads>*>(memory));      \
  }                                                                                   \
  }
#define FLASHPORT_DEFINE_DECODE_STAGE2(symbol, name) FLASHPORT_DEFINE_MERGE(symbol, Stage2Params, decode_stage2)
#define FLASHPORT_DEFINE_MERGE_STATES(symbol, name) FLASHPORT_DEFINE_MERGE(symbol, MergeStatesParams, merge_states)
