// The table entries of the HIP kernels of the gated delta rule.
#pragma once

#include "hip/runtime/kernel_entry.h"
#include FLASHPORT_GATED_DELTA_TUNING_HEADER

namespace flashport::hip_runtime {

// A team is a wave: waves need nothing of each other.
constexpr KernelEntry gated_delta_update_entry(const char* key, const KernelSymbol* symbol, int head_dim_k, DType state,
                                               int key_major, GateForm gate) {
  using namespace FLASHPORT_TARGET;
  const GatedDeltaShape shape{head_dim_k, state, key_major, gate};
  const GatedDeltaTuning tuning = gated_delta_tuning(shape);
  return {.key = key,
          .tag = KernelTag::kGatedDeltaUpdate,
          .threads = tuning.waves * kWaveSize,
          .handle = symbol,
          .shape = {.gated_delta_update = {shape, tuning}},
          .teams = tuning.waves};
}

constexpr KernelEntry gated_delta_prepare_entry(const char* key, const KernelSymbol* symbol, MathType math,
                                                int head_dim_k) {
  using namespace FLASHPORT_TARGET;
  return {.key = key,
          .tag = KernelTag::kGatedDeltaPrepare,
          .threads = kPrepareThreads,
          .handle = symbol,
          .shape = {.gated_delta_chunk = {math, head_dim_k}}};
}
constexpr KernelEntry gated_delta_chunk_entry(const char* key, const KernelSymbol* symbol, MathType math,
                                              int head_dim_k) {
  using namespace FLASHPORT_TARGET;
  return {.key = key,
          .tag = KernelTag::kGatedDeltaChunk,
          .threads = chain_threads(head_dim_k),
          .handle = symbol,
          .shape = {.gated_delta_chunk = {math, head_dim_k}}};
}

}  // namespace flashport::hip_runtime
