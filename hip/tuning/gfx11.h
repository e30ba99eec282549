// Schedules of the decode kernels on RDNA3 (gfx1100 to gfx1103, gfx1150 to gfx1153). A multiprocessor is a work-group
// processor: four SIMDs with 1024 or 1536 registers a lane and 128 KB of LDS. K and V go straight to registers, so what
// hides the latency of device memory is the number of resident waves: four a SIMD leave each 256 registers.
#pragma once

#include "common/device/config.h"
#include "common/device/gated_delta_config.h"

namespace flashport::gfx11 {

inline constexpr int kWaveSize = 32;
inline constexpr int kMergeThreads = 128;
inline constexpr int kAppendThreads = 128;
inline constexpr int kPrepareThreads = 128;

// stages 2: the first keys of the next leaf are loaded while P V of this one is worked out, which costs registers.
constexpr DecodeTuning decode_tuning(const DecodeShape& shape) {
  const bool narrow = shape.head_dim_v < 128;
  const int waves = (narrow ? 2 : 4) * (shape.rows == 64 ? 2 : 1);
  return {waves, shape.head_dim_v <= 128 ? 2 : 1, 16 / waves};
}

// By estimate: a wave has 4 KB of a state [V, K] in flight, and of a state [K, V] up to 16 KB, so that what it reads of
// a row is 64 bytes (32 where keys are 256 and the state bf16); the waves of a work-group processor have several times
// what hides the latency.
constexpr GatedDeltaTuning gated_delta_tuning(const GatedDeltaShape& shape) {
  if (shape.key_major == 0) return {1024 / shape.head_dim_k, 4, 8};
  const int columns = 2048 / shape.head_dim_k;
  const int least = is_packed(shape) && shape.head_dim_k != 256 ? 32 : 16;
  return {columns < least ? least : columns, 4, 4};
}

// Of a block of the chain over chunks: a wave for each 16 of its columns and 128 keys, which fill half its registers.
constexpr int chain_threads(int head_dim_k) { return head_dim_k > 128 ? 256 : 128; }

}  // namespace flashport::gfx11
