// Schedules of the decode kernels on CDNA3 (MI300 series). Plain C++: the host reads block sizes from it.
//
// K and V go from memory to registers without shared memory between (hip/target/mfma_pipeline.h), so latency is hidden
// by what the waves of a CU have in flight: four of them, one a SIMD with 512 registers each, hold 64 to 128 KB, where
// 20 KB would fill the memory's bandwidth. A wave takes 128 columns of V, where a lane's part is 16 bytes wide.
#pragma once

#include "common/device/config.h"

namespace flashport::gfx942 {

inline constexpr int kWaveSize = 64;
inline constexpr int kMergeThreads = 128;
inline constexpr int kAppendThreads = 128;

constexpr DecodeTuning decode_tuning(const DecodeShape& shape) {
  const int column_waves = shape.head_dim_v <= 128 ? 1 : shape.head_dim_v / 128;
  const int row_waves = shape.rows == 64 ? 2 : 1;
  const int waves = column_waves * row_waves;
  return {waves, 1, waves > 4 ? 1 : 4 / waves};
}

}  // namespace flashport::gfx942
