// Schedules of the decode kernels on CPUs: one thread a block.
#pragma once

#include "common/device/decode/config.h"

namespace flashport::FLASHPORT_TARGET {

// Two stages: the leaf after the current one is prefetched.
constexpr DecodeTuning decode_tuning(const DecodeShape&) { return {1, 2, 1}; }

}  // namespace flashport::FLASHPORT_TARGET
