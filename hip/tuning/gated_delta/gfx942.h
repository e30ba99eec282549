// Schedules of the kernels of the gated delta rule on CDNA3.
#pragma once

#include "common/device/gated_delta/config.h"

namespace flashport::gfx942 {

inline constexpr int kPrepareThreads = 256;

// By estimate: a wave has 8 KB of a state [V, K] in flight, and of a state [K, V] 16 KB, so that what it reads of a row
// is 64 bytes or more; in both layouts the waves of a CU have several times the bytes in flight that hide the latency.
constexpr GatedDeltaTuning gated_delta_tuning(const GatedDeltaShape& shape) {
  const int gates = shape.gate != GateForm::kHead ? 1 : 0;  // gates take registers of their own
  if (shape.key_major == 0) return {2048 / shape.head_dim_k, 4, 6 - gates};
  const int columns = 4096 / shape.head_dim_k;
  const int least = is_packed(shape) ? 32 : 16;
  return {columns < least ? least : columns, 4, columns < least ? 2 : 4 - gates};
}

// Threads of a block of the chain over chunks: a wave for each 16 of its columns.
constexpr int chain_threads(int) { return 256; }

}  // namespace flashport::gfx942
