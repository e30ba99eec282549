// The compile-time description of one decode kernel: its shape (a row of cmake/decode_instances.txt) and the schedule
// that <vendor>/tuning/decode/<target>.h chose for that shape.
#pragma once

#include "common/device/core/types.h"
#include "common/device/kv/format.h"

namespace flashport {

// The template shape of a decode kernel; one row of cmake/decode_instances.txt.
struct DecodeShape {
  int head_dim_qk;  // tile extents: 80 and 96 ride 128 with zero fill
  int head_dim_v;
  int rows;  // query rows of a tile: 8, 16 or 64
  MathType math;
  KvFormat k_format;
  KvFormat v_format;
};

struct DecodeTuning {
  int waves;                      // lane groups of a block that compute
  int stages;                     // buffers in flight or in use, as the target counts them
  int blocks_per_multiprocessor;  // what the register and shared-memory budget is cut for
  int producer_waves = 0;         // lane groups beside them that only copy
  int teams = 1;                  // such blocks in one block of the device, which share their copies where they can
};

struct DecodeConfig {
  DecodeShape shape;
  DecodeTuning tuning;
};

}  // namespace flashport
