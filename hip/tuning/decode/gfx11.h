// Schedules of the decode kernels on RDNA3 (gfx1100 to gfx1103, gfx1150 to gfx1153). A multiprocessor is a work-group
// processor: four SIMDs with 1024 or 1536 registers a lane and 128 KB of LDS. K and V go straight to registers, so what
// hides the latency of device memory is the number of resident waves: four a SIMD leave each 256 registers.
#pragma once

#include "common/device/decode/config.h"

namespace flashport::gfx11 {

// Rows of segments are widened in shared memory (hip/decode/segment_rows.h), which then limits how many blocks there
// are. With 2 stages the first keys of the next leaf are loaded while P V of this one is computed, which costs
// registers.
constexpr DecodeTuning decode_tuning(const DecodeShape& shape) {
  const bool narrow = shape.head_dim_v < 128;
  const int waves = (narrow ? 2 : 4) * (shape.rows == 64 ? 2 : 1);
  if (reads_segments(shape)) return {waves, 1, shape.head_dim_qk <= 128 ? 16 / waves : 2};
  return {waves, shape.head_dim_v <= 128 ? 2 : 1, 16 / waves};
}

}  // namespace flashport::gfx11
