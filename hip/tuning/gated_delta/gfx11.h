// Schedules of the kernels of the gated delta rule on RDNA3.
#pragma once

#include "common/device/gated_delta/config.h"

namespace flashport::gfx11 {

inline constexpr int kPrepareThreads = 128;

// By estimate: a wave has 4 KB of a state [V, K] in flight, and of a state [K, V] up to 16 KB, so that what it reads of
// a row is 64 bytes (32 where keys are 256 and the state bf16); the waves of a work-group processor have several times
// the bytes in flight that hide the latency.
constexpr GatedDeltaTuning gated_delta_tuning(const GatedDeltaShape& shape) {
  if (shape.key_major == 0) return {1024 / shape.head_dim_k, 4, 8};
  const int columns = 2048 / shape.head_dim_k;
  const int least = is_packed(shape) && shape.head_dim_k != 256 ? 32 : 16;
  return {columns < least ? least : columns, 4, 4};
}

// Threads of a block of the chain over chunks: a wave for each 16 of its columns and 128 keys, which fill half its
// registers.
constexpr int chain_threads(int head_dim_k) { return head_dim_k > 128 ? 256 : 128; }

}  // namespace flashport::gfx11
