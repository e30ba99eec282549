// Numbers of RDNA3 (gfx1100 to gfx1103, gfx1150 to gfx1153) that the device and the host must agree on, whatever the
// operation. Plain C++: the host reads block sizes from it.
#pragma once

#define FLASHPORT_ATTENTION_TUNING_HEADER "hip/tuning/attention/gfx11.h"
#define FLASHPORT_DECODE_TUNING_HEADER "hip/tuning/decode/gfx11.h"
#define FLASHPORT_GATED_DELTA_TUNING_HEADER "hip/tuning/gated_delta/gfx11.h"

namespace flashport::gfx11 {

inline constexpr int kWaveSize = 32;
inline constexpr int kMergeThreads = 128;
inline constexpr int kAppendThreads = 128;

}  // namespace flashport::gfx11
