// The compile-time description of one kernel of the gated delta rule: its shape (a row of
// cmake/gated_delta_instances.txt or cmake/gated_delta_chunk_instances.txt) and how
// <vendor>/tuning/gated_delta/<target>.h cuts the work for that shape.
#pragma once

#include "common/device/core/types.h"

namespace flashport {

struct GatedDeltaShape {
  int head_dim_k;  // extent of the tile: shorter heads are padded to it with zeros
  DType state;     // the pool's; a kernel of kAny learns it at run time: kFloat32 takes fp32 and bf16, kFloat16 fp16
  int key_major;   // states are [K, V], else [V, K]
  GateForm gate;
};

// Whether states stay 16 bits wide from the pool to their first use. Kernels of any gates, which learn the pool's type
// at run time, widen states when they load them.
constexpr bool is_packed(const GatedDeltaShape& shape) {
  return shape.state != DType::kFloat32 && shape.gate != GateForm::kAny;
}

struct GatedDeltaTuning {
  int columns;                    // columns of V that a block takes; bits do not depend on it
  int waves;                      // waves of a block
  int blocks_per_multiprocessor;  // resident blocks that the register budget allows
};

struct GatedDeltaConfig {
  GatedDeltaShape shape;
  GatedDeltaTuning tuning;
};

inline constexpr int kChunkColumns = 64;  // columns of V that a block takes on every target

struct GatedDeltaChunkConfig {
  MathType math;                // of the operands of products; the sums are fp32
  int head_dim_k;               // extent of the tile: shorter heads are padded to it
  int columns = kChunkColumns;  // bits do not depend on it
};

}  // namespace flashport
