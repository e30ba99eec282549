// Numbers of CDNA4 (MI350X, MI355X) that the device and the host must agree on: those of CDNA3.
#pragma once

#include "hip/tuning/gfx942.h"

#undef FLASHPORT_ATTENTION_TUNING_HEADER
#undef FLASHPORT_DECODE_TUNING_HEADER
#undef FLASHPORT_GATED_DELTA_TUNING_HEADER
#define FLASHPORT_ATTENTION_TUNING_HEADER "hip/tuning/attention/gfx950.h"
#define FLASHPORT_DECODE_TUNING_HEADER "hip/tuning/decode/gfx950.h"
#define FLASHPORT_GATED_DELTA_TUNING_HEADER "hip/tuning/gated_delta/gfx950.h"

namespace flashport::gfx950 {

using gfx942::kAppendThreads;
using gfx942::kMergeThreads;
using gfx942::kWaveSize;

}  // namespace flashport::gfx950
