// Makes the kernels of a CPU target that merge partial results.
#pragma once

#include "common/device/merge/merge_kernel.h"
#include "cpu/arch/define_kernel.h"

#define FLASHPORT_DEFINE_DECODE_STAGE2(symbol, name)                                            \
  namespace flashport::FLASHPORT_TARGET::merge {                                                \
  FLASHPORT_DEFINE_KERNEL(symbol, name, KernelTag::kDecodeStage2, Stage2Params, MergeShared<1>, \
                          decode_stage2<1>(params, block, shared))                              \
  }

#define FLASHPORT_DEFINE_MERGE_STATES(symbol, name)                                                 \
  namespace flashport::FLASHPORT_TARGET::merge {                                                    \
  FLASHPORT_DEFINE_KERNEL(symbol, name, KernelTag::kMergeStates, MergeStatesParams, MergeShared<1>, \
                          merge_states<1>(params, block, shared))                                   \
  }
