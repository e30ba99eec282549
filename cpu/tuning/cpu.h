// Schedules of the kernels on CPUs: one thread a block.
#pragma once

#include "common/device/config.h"
#include "common/device/gated_delta_config.h"

namespace flashport::FLASHPORT_TARGET {

// The leaf after the current one is being prefetched.
constexpr DecodeTuning decode_tuning(const DecodeShape&) { return {1, 2, 1}; }

// Of 32 columns a slice of 128 keys stays in the first cache; gates of keys are worked out for each slice anew, so
// these are wide. 32 heads of [128, 128], one token, two cores: 0.19 ms, 64 columns 0.29; with gates of keys 0.41 ms,
// 64 columns 0.49, 32 columns 0.61. Of kernels that take any gates, most calls have one a head: 0.31 ms, gates of keys
// that are given 0.49.
constexpr GatedDeltaTuning gated_delta_tuning(const GatedDeltaShape& shape) {
  return {shape.gate == GateForm::kKey ? 128 : 32, 1, 1};
}

}  // namespace flashport::FLASHPORT_TARGET
