// How attention cuts its work on CDNA4. A multiprocessor has 160 KB of LDS, which two tiles of keys and two of values
// share, and 512 registers a lane of a SIMD. By estimate (ci/loop_audit.py).
#pragma once

#include "common/device/attention/config.h"

namespace flashport::gfx950 {

inline constexpr int kDropoutMaskThreads = 256;

// Up to 128 columns a SIMD has two waves, whose groups take turns; a wave of 256 columns takes all registers, and one
// of 512 has half of V's columns. Keys that may lie on pages come through registers, which are taken from scores: tiles
// of 128 columns have fewer keys, or waves take all registers.
constexpr AttentionTuning attention_tuning(const AttentionShape& shape) {
  const int wider = shape.head_dim_qk > shape.head_dim_v ? shape.head_dim_qk : shape.head_dim_v;
  const bool plain = shape.form == ScoreForm::kPlain;
  // queries, keys, stages, slices of V, work tiles of a lone sequence, for 256 multiprocessors
  if (shape.sources != KeySources::kRows && wider > 64 && wider <= 128) return {plain ? 256 : 128, 64, 2, 1, 256};
  if (wider <= 128) return {256, plain ? 128 : 64, 2, 1, 256};
  if (wider <= 192 && plain) return {256, 64, 2, 1, 256};
  if (wider <= 256) return {128, 64, 2, 1, 256};
  return {64, 32, 2, 2, 256};
}

// A wave for every 32 queries, and every slice of V's columns.
constexpr int attention_threads(const AttentionShape& shape) {
  return attention_tuning(shape).rows * attention_tuning(shape).slices * 2;
}

// Places of a row of keys in LDS (hip/attention/layout.h).
constexpr int attention_key_places(int head_dim_qk) { return head_dim_qk == 128 ? 16 : 8; }

// Whether queries are in LDS: they stay in registers.
constexpr bool attention_shares_queries(const AttentionShape&) { return false; }
// Whether keys and values have one place in LDS in turn: there is room for both.
constexpr bool attention_tiles_take_turns(const AttentionShape&) { return false; }

}  // namespace flashport::gfx950
