// Schedules of the decode kernels on CDNA4 (MI350X, MI355X): those of CDNA3. By estimate, not yet by measurement: a
// CU's part of the memory's bandwidth is 13 to 14 bytes a clock (docs/tuning.md), which at 2000 clocks of latency
// needs some 28 KB in flight. Half a leaf of each wave is 32 KB or more of a CU with 16 query rows (26 KB of keys of
// q8_0 with values of q4_0); with 64 rows of codes of 8 bits it is 16 KB and a whole leaf 32 KB, of 4 bits 9 and 18 KB,
// and registers leave no room for more waves. Matrix instructions of 32 keys or dims would give nothing: with 64 query
// rows at head_dim 128, those of 16 take a CU some 1000 clocks for a leaf of 32 KB, which takes 2300 clocks to arrive.
#pragma once

#include "hip/tuning/decode/gfx942.h"

namespace flashport::gfx950 {

constexpr DecodeTuning decode_tuning(const DecodeShape& shape) {
  return reads_segments(shape) ? gfx942::segment_tuning(shape, 160) : gfx942::decode_tuning(shape);
}

}  // namespace flashport::gfx950
