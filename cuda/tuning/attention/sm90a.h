// How attention cuts its work on Hopper, one row a class of shapes. A block has 227 KB of shared memory: the queries,
// and `stages` tiles of keys and of values. 64 queries are a warpgroup's. TFLOP/s in comments: H200, bf16, the variants
// that were measured (docs/tuning.md).
#pragma once

#include "common/device/attention/config.h"

namespace flashport::sm90a {

// Whether rows of other formats are brought by warps of two warpgroups that have memory for them as they are stored.
constexpr bool widens(const AttentionShape& shape) {
  return has(shape.sources, KeySources::kBytes) && shape.form == ScoreForm::kPlain && shape.head_dim_qk == 128;
}

constexpr AttentionTuning attention_tuning(const AttentionShape& shape) {
  const bool any = shape.form != ScoreForm::kPlain;  // whose random bits serve 32 keys at a time
  const bool bare = !any || shape.form == ScoreForm::kSoftcap;
  const int wider = shape.head_dim_qk > shape.head_dim_v ? shape.head_dim_qk : shape.head_dim_v;
  // queries, keys, stages, slices of V (1), work tiles of a lone sequence, stages of values: they are free later than
  // keys, after a softmax, and are wanted as soon; blocks that share tiles
  // 1 x 16k causal: 507; {128, 128, 2} 439, {128, 160, 2} 444. 4 x 4k full with a softcap: 294; 128 rows 270
  if (wider <= 64) return {bare ? 192 : 128, 128, 2, 1, 128, 3};
  // 4 x 4k causal: 596; {128, 160, 2} and {128, 176, 2} 554, which also lose at 16 x 1k (416; 378, 352)
  // Rows as they are stored, or a bias, have the room of a tile of values.
  // Where rows are widened two blocks share them.
  if (widens(shape)) return {128, 128, 2, 1, 128, 2, 2};
  if (wider <= 128) return {128, 128, 2, 1, 128, shape.form == ScoreForm::kBias ? 2 : 3};
  // 16/16 4 x 4k full: 694; 80 keys 644. Biases have the room of 64 keys; kernels of all options compile in half the
  // time with 64.
  if (wider <= 192 && shape.head_dim_v <= 128) return {128, has(shape.form, ScoreForm::kBias) ? 64 : 128, 2};
  if (wider <= 256) return {128, any ? 64 : 80, 2};
  return {64, 32, 2, 2};
}

// Stages of biases of each warpgroup's queries, of 9 KB, in a kernel of them alone: what there is room for, and used.
constexpr int bias_stages(const AttentionShape& shape) {
  const int wider = shape.head_dim_qk > shape.head_dim_v ? shape.head_dim_qk : shape.head_dim_v;
  return wider <= 64 ? 6 : wider <= 192 ? 3 : 1;
}

// The registers of a lane of consumers and of producers: those of a lane of each warpgroup together are at most 504 for
// three warpgroups, which a block starts with, and 512 for four.
struct WarpgroupRegisters {
  int consumer, producer;
};
constexpr WarpgroupRegisters attention_registers(const AttentionConfig& config) {
  const AttentionTuning& tuning = config.tuning;
  if (tuning.slices > 1) return {216, 72};
  if (tuning.rows > 128) return {160, 32};
  if (widens(config.shape)) return {192, 64};
  // What is done to scores takes registers, and so do 80 keys of 256 columns.
  if (config.shape.form == ScoreForm::kAny) return {240, 24};
  if (config.shape.form == ScoreForm::kBias) return {224, 56};
  if (config.shape.form == ScoreForm::kDropout || config.shape.head_dim_v > 128) return {232, 40};
  return {216, 72};
}

// Warpgroups of producers, and the memory that these have for rows as they are stored.
constexpr int producer_groups(const AttentionConfig& config) { return widens(config.shape) ? 2 : 1; }
constexpr int stored_bytes(const AttentionConfig& config) { return widens(config.shape) ? 60 * 1024 : 0; }

// Whether producers have the registers to bring aligned rows as AlignedRowProducer does; otherwise these come as all
// other rows do, in two thirds of the rate.
constexpr bool copies_aligned_rows(const AttentionConfig& config) {
  const AttentionShape& shape = config.shape;
  if (has(shape.sources, KeySources::kBytes) || shape.form == ScoreForm::kBias) return false;
  return attention_registers(config).producer >= 56 && shape.head_dim_qk <= 128;
}

}  // namespace flashport::sm90a
