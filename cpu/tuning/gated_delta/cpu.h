// Schedules of the kernels of the gated delta rule on CPUs: one thread a block.
#pragma once

#include "common/device/gated_delta/config.h"

namespace flashport::FLASHPORT_TARGET {

// A slice of 32 columns and 128 keys stays in the first-level cache; gates of keys are computed for each slice anew, so
// there slices are wide. 32 heads of [128, 128], one token, one core: 62 us, 64 or 128 columns 60, but these give many
// cores too few slices; with gates of keys 128 us, 64 columns 195, 32 columns 330. With the kernels for any gates most
// calls have one gate a head: 107 us.
constexpr GatedDeltaTuning gated_delta_tuning(const GatedDeltaShape& shape) {
  return {shape.gate == GateForm::kKey ? 128 : 32, 1, 1};
}

}  // namespace flashport::FLASHPORT_TARGET
