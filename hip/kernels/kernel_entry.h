// The host's side of a HIP kernel: its table entry. Compiled once per target by the host compiler, which must agree
// with the device's on block sizes; so those come from the target's tuning header, which is plain C++:
// kWaveSize, decode_tuning(shape), gated_delta_tuning(shape), chain_threads(head_dim_k), kMergeThreads, kAppendThreads,
// kPrepareThreads.
#pragma once

#include <string_view>

#include "common/device/gated_delta_chunk_params.h"
#include "common/host/backend_abi.h"
#include "hip/kernels/code_object.h"
#include FLASHPORT_TUNING_HEADER

namespace flashport::hip_runtime {

constexpr KernelEntry decode_entry(const char* key, const KernelSymbol* symbol, MathType math, KvFormat kv,
                                   int head_dim_qk, int head_dim_v, int rows) {
  using namespace FLASHPORT_TARGET;
  const DecodeShape shape{head_dim_qk, head_dim_v, rows, math, kv};
  return {key, shape, decode_tuning(shape).waves * kWaveSize, 0, symbol};
}

// A team is a wave, which works alone.
constexpr KernelEntry gated_delta_update_entry(const char* key, const KernelSymbol* symbol, int head_dim_k, DType state,
                                               int key_major, GateForm gate) {
  using namespace FLASHPORT_TARGET;
  const GatedDeltaShape shape{head_dim_k, state, key_major, gate};
  const GatedDeltaTuning tuning = gated_delta_tuning(shape);
  return {key, {}, tuning.waves * kWaveSize, 0, symbol, tuning.waves, {shape, tuning}};
}

constexpr KernelEntry gated_delta_prepare_entry(const char* key, const KernelSymbol* symbol, MathType math,
                                                int head_dim_k) {
  using namespace FLASHPORT_TARGET;
  return {key, gated_delta_chunk_shape({math, head_dim_k}), kPrepareThreads, 0, symbol};
}
constexpr KernelEntry gated_delta_chunk_entry(const char* key, const KernelSymbol* symbol, MathType math,
                                              int head_dim_k) {
  using namespace FLASHPORT_TARGET;
  return {key, gated_delta_chunk_shape({math, head_dim_k}), chain_threads(head_dim_k), 0, symbol};
}

constexpr KernelEntry plain_entry(const char* key, const KernelSymbol* symbol) {
  using namespace FLASHPORT_TARGET;
  const bool appends = std::string_view(key).starts_with("append_kv");
  return {key, {}, appends ? kAppendThreads : kMergeThreads, 0, symbol};
}

}  // namespace flashport::hip_runtime
