// How attention cuts its work on CDNA3. A multiprocessor has 64 KB of LDS, which two tiles of keys and two of values
// fill, and 512 registers a lane of a SIMD. By estimate (ci/loop_audit.py).
#pragma once

#include "common/device/attention/config.h"

namespace flashport::gfx942 {

inline constexpr int kDropoutMaskThreads = 256;

// Up to 128 columns a SIMD has two waves, whose groups take turns; a wave of 256 columns takes all registers.
constexpr AttentionTuning attention_tuning(const AttentionShape& shape) {
  const int wider = shape.head_dim_qk > shape.head_dim_v ? shape.head_dim_qk : shape.head_dim_v;
  // queries, keys, stages
  if (wider <= 64) return {256, shape.form != ScoreForm::kPlain ? 64 : 128, 2};
  if (wider <= 128) return {256, 64, 2};
  return {128, 32, 2};
}

// A wave for every 32 queries.
constexpr int attention_threads(const AttentionShape& shape) { return attention_tuning(shape).rows * 2; }

// Whether queries are in LDS: they stay in registers.
constexpr bool attention_shares_queries(const AttentionShape&) { return false; }

}  // namespace flashport::gfx942
