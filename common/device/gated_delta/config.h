// The compile-time description of one kernel of the gated delta rule: its shape (a row of
// cmake/gated_delta_instances.txt or cmake/gated_delta_chunk_instances.txt) and how
// <vendor>/tuning/gated_delta/<target>.h cuts the work for that shape.
#pragma once

#include <flashport/gated_delta.h>

#include "common/device/core/types.h"

namespace flashport {

struct GatedDeltaShape {
  int head_dim_k;  // extent of the tile: shorter heads ride it with zero fill
  DType state;     // of the pool; for kAny the pool's is known at run time: fp32, or bf16 (of kFloat16: fp16)
  int key_major;   // states are [K, V], else [V, K]
  GateForm gate;
};

// Whether states are of 16 bits from the pool to the first use; kernels of any gates, which learn the pool's type at
// run time, widen what they load.
constexpr bool is_packed(const GatedDeltaShape& shape) {
  return shape.state != DType::kFloat32 && shape.gate != GateForm::kAny;
}

struct GatedDeltaTuning {
  int columns;                    // of V that a block takes; bits do not depend on it
  int waves;                      // of a block
  int blocks_per_multiprocessor;  // what the register budget is cut for
};

struct GatedDeltaConfig {
  GatedDeltaShape shape;
  GatedDeltaTuning tuning;
};

inline constexpr int kChunkColumns = 64;  // of V that a block takes on every target

struct GatedDeltaChunkConfig {
  MathType math;                // of the operands of products; they are summed in fp32
  int head_dim_k;               // extent of the tile: shorter heads ride it
  int columns = kChunkColumns;  // bits do not depend on it
};

}  // namespace flashport
