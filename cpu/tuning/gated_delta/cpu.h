// Schedules of the kernels of the gated delta rule on CPUs: one thread a block.
#pragma once

#include "common/device/gated_delta/config.h"

namespace flashport::FLASHPORT_TARGET {

// Of 32 columns a slice of 128 keys stays in the first cache; gates of keys are worked out for each slice anew, so
// these are wide. 32 heads of [128, 128], one token, one core: 62 us, 64 or 128 columns 60, but these leave many cores
// little to share; with gates of keys 128 us, 64 columns 195, 32 columns 330. Of kernels that take any gates, most
// calls have one a head: 107 us.
constexpr GatedDeltaTuning gated_delta_tuning(const GatedDeltaShape& shape) {
  return {shape.gate == GateForm::kKey ? 128 : 32, 1, 1};
}

}  // namespace flashport::FLASHPORT_TARGET
