// How attention cuts its work on RDNA3. A block has 64 KB of LDS at most, and a lane 256 registers. By estimate
// (ci/loop_audit.py).
#pragma once

#include "common/device/attention/config.h"

namespace flashport::gfx11 {

inline constexpr int kDropoutMaskThreads = 256;

constexpr AttentionTuning attention_tuning(const AttentionShape& shape) {
  const int wider = shape.head_dim_qk > shape.head_dim_v ? shape.head_dim_qk : shape.head_dim_v;
  // queries, keys, stages
  return {128, wider <= 64 ? 64 : 32, 2};
}

// A wave for every 16 queries.
constexpr int attention_threads(const AttentionShape& shape) { return attention_tuning(shape).rows * 2; }

}  // namespace flashport::gfx11
