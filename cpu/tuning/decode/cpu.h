// Schedules of the decode kernels on CPUs: one thread a block.
#pragma once

#include "common/device/decode/config.h"

namespace flashport::FLASHPORT_TARGET {

// The leaf after the current one is being prefetched.
constexpr DecodeTuning decode_tuning(const DecodeShape&) { return {1, 2, 1}; }

}  // namespace flashport::FLASHPORT_TARGET
