// How attention cuts its work on CDNA3. A multiprocessor has 64 KB of LDS, which two tiles of keys and two of values
// fill, and 512 registers a lane of a SIMD. By estimate (ci/loop_audit.py).
#pragma once

#include "common/device/attention/config.h"

namespace flashport::gfx942 {

inline constexpr int kDropoutMaskThreads = 256;

// Up to 128 columns a SIMD has two waves, whose groups take turns; a wave of 256 columns takes all registers, and so
// does one of 128 with all that may be done to scores. With 512 columns LDS has room for one tile of keys and one of
// values, and a wave has registers for the queries and half of V's columns.
constexpr AttentionTuning attention_tuning(const AttentionShape& shape) {
  const int wider = shape.head_dim_qk > shape.head_dim_v ? shape.head_dim_qk : shape.head_dim_v;
  const bool plain = shape.form == ScoreForm::kPlain;
  // queries, keys, stages, slices of V, work tiles of a lone sequence, for some 300 multiprocessors
  if (wider <= 64) return {256, plain ? 128 : 64, 2, 1, 256};
  if (wider <= 128) return {plain ? 256 : 128, 64, 2, 1, 256};
  if (wider <= 192 && plain) return {256, 32, 2, 1, 256};
  if (wider <= 256) return {128, 32, 2, 1, 256};
  return {64, 32, 1, 2, 256};
}

// A wave for every 32 queries, and every slice of V's columns.
constexpr int attention_threads(const AttentionShape& shape) {
  return attention_tuning(shape).rows * attention_tuning(shape).slices * 2;
}

// Places of a row of keys in LDS (hip/attention/layout.h).
constexpr int attention_key_places(int) { return 8; }

// Whether queries are in LDS: they stay in registers.
constexpr bool attention_shares_queries(const AttentionShape&) { return false; }
// Whether keys and values have one place in LDS in turn: there is room for both.
constexpr bool attention_tiles_take_turns(const AttentionShape&) { return false; }

}  // namespace flashport::gfx942
