// The compile-time description of one attention kernel: its shape (a row of cmake/attention_instances.txt) and how
// <vendor>/tuning/attention/<target>.h cuts the work for that shape.
#pragma once

#include "common/device/core/types.h"

namespace flashport {

// What a kernel can do to a score between the product and the softmax, besides the scale and the mask by position: a
// set of bits. Each is a uniform run-time branch of kAny. A kernel of one option serves calls that have just it, so
// that it asks nothing at run time: those with positive scales, and of biases those whose rows have keys as neighbours.
enum class ScoreForm : std::int32_t { kPlain = 0, kSoftcap = 1, kAlibi = 2, kBias = 4, kDropout = 8, kAny = 15 };

constexpr bool has(ScoreForm form, ScoreForm option) {
  return (static_cast<int>(form) & static_cast<int>(option)) == static_cast<int>(option);
}

// Where a kernel can read keys and values from, besides rows of the math type: a set of bits, of
// which each name has those before it. kBytes: fp16, bf16, fp8 e4m3, FNUZ and q8_0, K and V chosen freely; kernels of
// fp16 have queries and outputs of bf16 too. kAll: every format. kScaled: those with scales beside
// the keys and values, one for each row or group of values.
enum class KeySources : std::int32_t { kRows = 0, kPages = 1, kFp8 = 3, kBytes = 7, kAll = 15, kScaled = 31 };

constexpr bool has(KeySources sources, KeySources needed) {
  return (static_cast<int>(sources) & static_cast<int>(needed)) == static_cast<int>(needed);
}

struct AttentionShape {
  MathType math;
  int head_dim_qk, head_dim_v;  // extents of tiles: shorter heads are padded to them with zeros
  ScoreForm form;
  KeySources sources;
};

// Kernels in bf16 of softcaps alone look for no largest score: weights are 2^score, where scores are at most this large
// (caps of 50), so that their products with values of up to 2^37 have fp32 sums over 100,000 keys. Calls with a larger
// cap go to kernels of all options.
inline constexpr float kMostUnshiftedScore = 73.0f;
constexpr bool has_unshifted_weights(const AttentionShape& shape) {
  return shape.form == ScoreForm::kSoftcap && shape.math == MathType::kBf16;
}

// A row's bits depend on `keys`, and on nothing else here; where keys are cut into pieces, on `rows` and `work_tiles`
// too.
struct AttentionTuning {
  int rows;        // queries of a work tile
  int keys;        // of a key tile
  int stages;      // key tiles in flight or in use
  int slices = 1;  // parts of V's columns, where a group of waves has no room for all: each computes the scores anew
  int work_tiles = 128;  // that keys of a lone sequence are cut for: about as many blocks as a device runs at a time
  int value_stages = 0;  // tiles of values in flight or in use, where those are not as many as of keys
  int cluster = 1;       // blocks that may share the tiles of a kv head, where so many divide its query heads
};

struct AttentionConfig {
  AttentionShape shape;
  AttentionTuning tuning;
};

}  // namespace flashport
