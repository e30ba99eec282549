// Schedules of the decode kernels on CDNA3 (MI300 series). Plain C++: the host reads block sizes from it.
//
// K and V go from memory to registers without shared memory between (hip/target/mfma_pipeline.h), so latency is hidden
// by what the waves of a CU have in flight. By estimate, not yet by measurement: a CU's share of the memory's bandwidth
// is about 8 bytes a clock, which at 2000 clocks of latency wants some 20 KB in flight. Four waves, one a SIMD with up
// to 512 registers a lane, hold half a leaf to a leaf each; where a leaf is small, eight do. A wave takes 128 columns
// of V, where a lane's part of a 16-bit row is 16 bytes wide.
#pragma once

#include "common/device/config.h"
#include "common/device/gated_delta_config.h"

namespace flashport::gfx942 {

inline constexpr int kWaveSize = 64;
inline constexpr int kMergeThreads = 128;
inline constexpr int kAppendThreads = 128;
inline constexpr int kPrepareThreads = 256;

constexpr DecodeTuning decode_tuning(const DecodeShape& shape) {
  const int leaf_bytes = 64 * (kv_row_bytes(shape.kv, shape.head_dim_qk) + kv_row_bytes(shape.kv, shape.head_dim_v));
  const int column_waves = shape.head_dim_v <= 128 ? 1 : shape.head_dim_v / 128;
  const int row_waves = shape.rows == 64 ? 2 : 1;
  const int waves = column_waves * row_waves;
  return {waves, 1, (leaf_bytes < 12 * 1024 ? 8 : 4) / waves};
}

// By estimate: a wave has 8 KB of a state [V, K] in flight, and of a state [K, V] 16 KB, so that what it reads of a row
// is 64 bytes or more; of either, the waves of a CU have several times what hides the latency.
constexpr GatedDeltaTuning gated_delta_tuning(const GatedDeltaShape& shape) {
  const int gates = shape.gate != GateForm::kHead ? 1 : 0;  // take registers of their own
  if (shape.key_major == 0) return {2048 / shape.head_dim_k, 4, 6 - gates};
  const int columns = 4096 / shape.head_dim_k;
  const int least = is_packed(shape) ? 32 : 16;
  return {columns < least ? least : columns, 4, columns < least ? 2 : 4 - gates};
}

// Of a block of the chain over chunks: a wave for each 16 of its columns.
constexpr int chain_threads(int) { return 256; }

}  // namespace flashport::gfx942
