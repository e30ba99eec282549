// Schedules of the decode kernels on CDNA4 (MI350X, MI355X): those of CDNA3, and for the same reason. By estimate, not
// yet by measurement: a CU's share of the memory's bandwidth is about 13 bytes a clock (docs/tuning.md), which at 2000
// clocks of latency wants some 26 KB in flight, and the smallest leaves of those schedules hold 32 KB. Matrix
// instructions of 32 keys or dims would give nothing: with 64 query rows at head_dim 128, those of 16 take a CU some
// 1000 clocks a leaf, and its bytes 2500.
#pragma once

#include "hip/tuning/gfx942.h"

namespace flashport::gfx950 {

using gfx942::decode_tuning;
using gfx942::kAppendThreads;
using gfx942::kMergeThreads;
using gfx942::kWaveSize;

}  // namespace flashport::gfx950
