// Schedules of the kernels of the gated delta rule on CDNA4: those of CDNA3.
#pragma once

#include "hip/tuning/gated_delta/gfx942.h"

namespace flashport::gfx950 {

using gfx942::chain_threads;
using gfx942::gated_delta_tuning;
using gfx942::kPrepareThreads;

}  // namespace flashport::gfx950
