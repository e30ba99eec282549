// The compile-time description of one decode kernel: its shape (a row of cmake/decode_instances.txt) and the schedule
// that <vendor>/tuning/<target>.h chose for that shape.
#pragma once

#include "common/device/params.h"

namespace flashport {

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

// Bytes of one K or V row of `dim` elements as stored.
constexpr int kv_row_bytes(KvFormat format, int dim) {
  switch (format) {
    case KvFormat::kFp32: return 4 * dim;
    case KvFormat::kFp16:
    case KvFormat::kBf16: return 2 * dim;
    case KvFormat::kFp8E4M3:
    case KvFormat::kFp8E4M3Fnuz: return dim;
    case KvFormat::kQ8_0: return dim / 32 * 34;
  }
  return 0;
}

}  // namespace flashport
