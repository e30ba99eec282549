// Schedules of the kernels on CPUs: one thread a block.
#pragma once

#include "common/device/config.h"
#include "common/device/gated_delta_config.h"

namespace flashport::FLASHPORT_TARGET {

// The leaf after the current one is being prefetched.
constexpr DecodeTuning decode_tuning(const DecodeShape&) { return {1, 2, 1}; }

// A slice of a state [128, 128] fits the first cache, and the gates of keys are worked out for 64 columns at a time.
constexpr GatedDeltaTuning gated_delta_tuning(const GatedDeltaShape&) { return {64, 1, 1}; }

}  // namespace flashport::FLASHPORT_TARGET
