// How the attention kernels of CPUs cut the work: one thread a block.
#pragma once

#include "common/device/attention/config.h"

namespace flashport::FLASHPORT_TARGET {

// A tile of 64 keys is a panel of K and one of V, each in the first-level cache for head_dim 128 while all rows pass.
constexpr AttentionTuning attention_tuning(const AttentionShape&) { return {192, 64, 1}; }

}  // namespace flashport::FLASHPORT_TARGET
