// How the attention kernels of CPUs cut the work: one thread a block.
#pragma once

#include "common/device/attention/config.h"

namespace flashport::FLASHPORT_TARGET {

// With head_dim 128 a panel of K or V stays in the first-level cache while all rows pass, and the tile in the second.
constexpr AttentionTuning attention_tuning(const AttentionShape& shape) {
  return shape.math == MathType::kBf16 ? AttentionTuning{512, 256, 1} : AttentionTuning{384, 128, 1};
}

}  // namespace flashport::FLASHPORT_TARGET
