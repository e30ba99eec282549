// Schedules of the decode kernels on CDNA3 (MI300 series).
//
// K and V go from memory to registers without shared memory between (hip/decode/mfma_pipeline.h), so latency is hidden
// by what the waves of a CU have in flight. By estimate, not yet by measurement: a CU's part of the memory's bandwidth
// is about 8 bytes a clock, which at 2000 clocks of latency needs some 20 KB in flight. Four waves, one a SIMD with up
// to 512 registers a lane, hold half a leaf to a leaf each; where a leaf is small, eight do with 16 rows. A wave takes
// 128 columns of V, where a lane's part of a 16-bit row is 16 bytes wide, or 64 with 64 query rows: with 128 these
// would leave no registers for a second state.
#pragma once

#include "common/device/decode/config.h"

namespace flashport::gfx942 {

// Rows of segments are widened in shared memory (hip/decode/segment_rows.h), of which a CU has `shared_kilobytes`.
// Registers leave room for two waves a SIMD, at head_dim 512 for one.
constexpr DecodeTuning segment_tuning(const DecodeShape& shape, int shared_kilobytes) {
  if (shape.head_dim_v > 256) return {4, 1, 1};
  const int waves = shape.head_dim_v < 256 ? 2 : 4;
  const int fit = shared_kilobytes / (waves == 2 ? 30 : 60);
  return {waves, 1, fit < 8 / waves ? fit : 8 / waves};
}

constexpr DecodeTuning decode_tuning(const DecodeShape& shape) {
  if (reads_segments(shape)) return segment_tuning(shape, 64);
  const int leaf_bytes =
      64 * (kv_row_bytes(shape.k_format, shape.head_dim_qk) + kv_row_bytes(shape.v_format, shape.head_dim_v));
  const int wave_columns = shape.rows == 64 ? 64 : 128;
  const int waves = shape.head_dim_v <= wave_columns ? 1 : shape.head_dim_v / wave_columns;
  return {waves, 1, (shape.rows < 64 && leaf_bytes < 12 * 1024 ? 8 : 4) / waves};
}

}  // namespace flashport::gfx942
