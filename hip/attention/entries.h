// The table entries of the HIP kernels of attention.
#pragma once

#include "hip/runtime/kernel_entry.h"
#include FLASHPORT_ATTENTION_TUNING_HEADER

namespace flashport::hip_runtime {

constexpr KernelEntry attention_entry(const char* key, const KernelSymbol* symbol, MathType math, int head_dim_qk,
                                      int head_dim_v, ScoreForm form, KeySources sources) {
  using namespace FLASHPORT_TARGET;
  const AttentionShape shape{math, head_dim_qk, head_dim_v, form, sources};
  return {.key = key,
          .tag = KernelTag::kAttention,
          .threads = attention_threads(shape),
          .handle = symbol,
          .shape = {.attention = {shape, attention_tuning(shape)}}};
}

constexpr KernelEntry attention_merge_entry(const char* key, const KernelSymbol* symbol) {
  return plain_entry(key, KernelTag::kAttentionMerge, symbol);
}

constexpr KernelEntry dropout_mask_entry(const char* key, const KernelSymbol* symbol) {
  return {
      .key = key, .tag = KernelTag::kDropoutMask, .threads = FLASHPORT_TARGET::kDropoutMaskThreads, .handle = symbol};
}

}  // namespace flashport::hip_runtime
