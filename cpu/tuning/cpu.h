// Schedules of the decode kernels on CPUs: one thread a block; the leaf after the current one is being prefetched.
#pragma once

#include "common/device/config.h"

namespace flashport::FLASHPORT_TARGET {

constexpr DecodeTuning decode_tuning(const DecodeShape&) { return {1, 2, 1}; }

}  // namespace flashport::FLASHPORT_TARGET
