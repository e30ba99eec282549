// The compile-time description of one kernel of the gated delta rule: its shape (a row of
// cmake/gated_delta_instances.txt) and how <vendor>/tuning/<target>.h cuts the work for that shape.
#pragma once

#include "common/device/params.h"

namespace flashport {

// What a kernel takes for gates: a, A_log and dt_bias for each head, or for each key, with sigmoid(b) for beta; or
// whatever of a call's gates there is, whose decays lie in memory or are made, and what beta is, also for each column.
enum class GateForm : std::int32_t { kHead, kKey, kAny };

struct GatedDeltaShape {
  int head_dim_k;  // extent of the tile: shorter heads ride it with zero fill
  DType state;     // of the pool, for kAny that of registers: the pool's is known at run time
  int key_major;   // states are [K, V], else [V, K]
  GateForm gate;
};

struct GatedDeltaTuning {
  int columns;                    // of V that a block takes; bits do not depend on it
  int waves;                      // of a block
  int blocks_per_multiprocessor;  // what the register budget is cut for
};

struct GatedDeltaConfig {
  GatedDeltaShape shape;
  GatedDeltaTuning tuning;
};

}  // namespace flashport
