// How attention cuts its work on RDNA3. A block has 64 KB of LDS at most, and a lane 256 registers. By estimate
// (ci/loop_audit.py).
#pragma once

#include "common/device/attention/config.h"

namespace flashport::gfx11 {

inline constexpr int kDropoutMaskThreads = 256;

// With 512 columns, and with 192/128 where each wave has all of V, LDS has room for queries and either keys or values.
constexpr AttentionTuning attention_tuning(const AttentionShape& shape) {
  const int wider = shape.head_dim_qk > shape.head_dim_v ? shape.head_dim_qk : shape.head_dim_v;
  const bool plain = shape.form == ScoreForm::kPlain;
  // queries, keys, stages, slices of V
  if (wider > 256) return {32, 32, 1, 4};
  if (wider == 192) return {128, 32, 1};
  if (wider > 128) return {plain ? 64 : 32, 32, 1, plain ? 2 : 4};
  return {128, wider <= 64 && plain ? 64 : 32, 2};
}

// A wave for every 16 queries, and every slice of V's columns.
constexpr int attention_threads(const AttentionShape& shape) {
  return attention_tuning(shape).rows * attention_tuning(shape).slices * 2;
}

// Places of a row of keys in LDS (hip/attention/layout.h).
constexpr int attention_key_places(int) { return 8; }

// Whether queries are in LDS, because registers have no room for them.
constexpr bool attention_shares_queries(const AttentionShape& shape) {
  return shape.head_dim_qk > (shape.form == ScoreForm::kPlain ? 128 : 64);
}

// Whether keys and values have one place in LDS in turn.
constexpr bool attention_tiles_take_turns(const AttentionShape& shape) {
  return shape.head_dim_qk > 256 || shape.head_dim_qk == 192;
}

}  // namespace flashport::gfx11
