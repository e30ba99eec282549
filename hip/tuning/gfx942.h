// Numbers of CDNA3 (MI300 series) that the device and the host must agree on, whatever the operation. Plain C++: the
// host reads block sizes from it.
#pragma once

#define FLASHPORT_ATTENTION_TUNING_HEADER "hip/tuning/attention/gfx942.h"
#define FLASHPORT_DECODE_TUNING_HEADER "hip/tuning/decode/gfx942.h"
#define FLASHPORT_GATED_DELTA_TUNING_HEADER "hip/tuning/gated_delta/gfx942.h"

namespace flashport::gfx942 {

inline constexpr int kWaveSize = 64;
inline constexpr int kMergeThreads = 128;
inline constexpr int kAppendThreads = 128;

}  // namespace flashport::gfx942
