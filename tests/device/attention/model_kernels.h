// Whole attention kernels of sm90a as entries of the table of model_backend.h: their own text, on the host.
#pragma once

#define FLASHPORT_TARGET sm90a
#define FLASHPORT_TARGET_HEADER "tests/device/machine/target.h"
#include FLASHPORT_TARGET_HEADER  // which names the words that the others take

#include "cuda/attention/kernels.h"

#include "tests/device/machine/model_backend.h"

namespace flashport::machine {

template <MathType kMath, int kDimQk, ScoreForm kForm, KeySources kSources, int kDimV = kDimQk>
KernelEntry attention_kernel(const char* key) {
  namespace attention = sm90a::attention;
  static constexpr AttentionConfig kCfg = attention::attention_config(kMath, kDimQk, kDimV, kForm, kSources);
  using Memory = attention::AttentionMemory<kCfg>;
  static const ModelKernel kRun = [](const void* params, void* shared) {
    attention::attention_block<kCfg>(*static_cast<const AttentionParams*>(params), *static_cast<Memory*>(shared));
  };
  return {.key = key,
          .tag = KernelTag::kAttention,
          .threads = attention::block_threads(kCfg),
          .shared_bytes = static_cast<int>(sizeof(Memory)),
          .handle = &kRun,
          .shape = {.attention = kCfg},
          .prepare = cuda_attention::encode_maps<kMath, kForm, kCfg.tuning.rows, kCfg.tuning.keys,
                                                 (sm90a::stored_bytes(kCfg) > 0)>};
}

// The launch after it, where keys are cut into pieces.
inline KernelEntry attention_merge_kernel(const char* key) {
  using Shared = sm90a::merge::MergeShared<128>;
  static const ModelKernel kRun = [](const void* params, void* shared) {
    sm90a::attention::merge_pieces<128>(*static_cast<const AttentionParams*>(params), sm90a::Block(nullptr),
                                        *static_cast<Shared*>(shared));
  };
  return {.key = key,
          .tag = KernelTag::kAttentionMerge,
          .threads = 128,
          .shared_bytes = static_cast<int>(sizeof(Shared)),
          .handle = &kRun};
}

}  // namespace flashport::machine
