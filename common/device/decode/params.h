// The argument of the decode kernels.
#pragma once

#include "common/device/core/divisor.h"
#include "common/device/core/types.h"
#include "common/device/decode/config.h"
#include "common/device/kv/params.h"

namespace flashport {

// How the leaves of a query tile become chunks (chunks.h).
struct ChunkRule {
  std::int32_t target_shift;  // a tile has at most 1 << target_shift chunks while they have up to 16 leaves
  std::int32_t least_shift;   // a chunk has 1 << least_shift leaves at least
  bool finer;                 // and up to twice as many chunks, where they have more than four leaves
  bool powers = false;        // the leaves of a chunk are a power of two
};

// How a grid cuts the line of leaves (schedule.h) into work ranges, one for each `concurrent` blocks.
struct LineCut {
  Divisor concurrent, ranges;
  std::int32_t rows;          // of a sequence's query tiles, `concurrent` side by side
  std::int32_t least_leaves;  // of all tiles for each block, or the line is cut for blocks alone
};

// The second launch that combines the tiles which no block has whole (combine_kernel.h).
struct CombineLaunch {
  std::int32_t parts;              // blocks of a slice; 0: no such launch, the block that is last combines the tile
  std::int32_t rows, columns;      // of a slice
  std::int32_t column_slices = 1;  // that have the same rows
};

struct DecodeParams {
  static constexpr bool kPlain = false;
  std::int32_t batch, num_q_heads, num_kv_heads, group_size;
  std::int32_t head_dim_qk, head_dim_v;
  std::int32_t row_tiles;  // ceil(group_size * max_q_len / rows)
  Divisor by_group_size, by_row_tiles;
  std::int32_t max_q_len;

  StridedRows q;
  const std::int32_t* cu_seqlens_q;  // null: max_q_len tokens each; else stride_seq of q, out, lse is unused

  PagedCache cache;

  // Scores: s = q.k * score_scale; with a softcap cap_scale * tanh(s). Base 2 in the end.
  float score_scale;                       // softmax_scale * log2e, or softmax_scale / softcap with softcap
  float cap_scale;                         // softcap * log2e; 0: no softcap
  std::int32_t window_left, window_right;  // -1: infinite; window_right is 0 where queries see no later keys
  std::int32_t clear_right;  // keys from the first query's position on that every query sees; 0 with a tree
  const float* alibi_slopes;
  std::int64_t alibi_stride_seq;
  const float* sinks;
  const std::uint32_t* tree_mask;
  std::int64_t tree_mask_stride;
  const float* k_scale;  // null: 1
  const float* v_scale;
  std::int32_t scale_stride;  // 0: one scale; 1: one per kv head

  StridedRows out;
  StridedRows lse;  // fp32, one number a row; null data: not wanted

  // Fixed chunks (stage 1, num_splits): chunk_keys > 0 keys each, or num_chunks equal parts of each sequence when
  // chunk_keys is 0. num_chunks == 0: the invariant schedule. In chunk mode out and lse gain a chunk axis:
  std::int32_t num_chunks;
  std::int64_t chunk_keys;
  std::int64_t out_stride_chunk, lse_stride_chunk;
  std::int32_t write_empty_chunks;  // write out 0 and lse -inf for chunks past the end of a sequence

  ChunkRule chunk_rule;
  LineCut cuts[2];  // a block alone; tiles of a sequence concurrently

  // Workspace (common/device/decode/chunks.h).
  float* partials;
  std::int32_t slices, slice_floats;  // of a partial result
  std::int32_t side_partials;         // of a block and tile
  std::uint32_t* counters;
  CombineLaunch combine;
  bool heads_side_by_side;      // of K and of V: as many as a device block has teams can be copied as one row
  bool teams_help;              // a device block counts as one: its first team has the work, and the others copy for it
  KvFormat k_format, v_format;  // for kernels that learn them here
};

// The argument of kernels that read factors: those of a row's values are a row of their own, at the same token and
// head; null data where they have none. Where a row has one of fp16, `data` and page_stride are multiples of four, and
// token_stride, too, where tokens of even numbers may have odd offsets into their pages.
struct FactorDecodeParams : DecodeParams {
  CacheParams k_factors, v_factors;
};

// The argument of kernels of plain calls, which are most calls of servers: what they do not ask for is constant here,
// and their kernels have no code for it. A block runs most of its code once, so code that is not needed is time
// (docs/tuning.md). Plain calls have also lengths of 32 bits, pages of a power of two (or none), no CSR, no lse, q and
// out of 16 bits, and rows that fill the kernel's tiles and can be copied in its widest units. Members of these names
// hide those of the base, which have the same values for what takes a DecodeParams.
struct PlainDecodeParams : DecodeParams {
  static constexpr bool kPlain = true;
  static constexpr const std::int32_t* cu_seqlens_q = nullptr;
  static constexpr float cap_scale = 0.0f;
  static constexpr std::int32_t window_left = -1, window_right = 0, clear_right = 1;
  static constexpr const float* alibi_slopes = nullptr;
  static constexpr const float* sinks = nullptr;
  static constexpr const std::uint32_t* tree_mask = nullptr;
  static constexpr std::int32_t num_chunks = 0;
};
// Whether keys and values are of the type that products are computed in.
constexpr bool is_of_math_type(const DecodeShape& shape) {
  return shape.k_format == (shape.math == MathType::kFp16 ? KvFormat::kFp16 : KvFormat::kBf16);
}
// Where they are, plain calls have q and out of that type, too.
template <DType kType>
struct PlainDecodeParamsOf : PlainDecodeParams {
  static constexpr DType kType16 = kType;
};
static_assert(sizeof(PlainDecodeParamsOf<DType::kFloat16>) == sizeof(DecodeParams));

inline constexpr int kMostSegments = 4;

// What is added to the logits of keys, by their position in the sequence, -inf where a key is hidden.
struct LogitBias {
  const void* data;  // null: none
  DType dtype;       // fp16 or fp32
  std::int64_t stride_seq, stride_head, stride_row, stride_key;
  const float* slopes;  // the factor of each query head; null: 1
};

// The argument of kernels whose formats are KvFormat::kAny: a sequence is its segments one after the other. In `cache`
// above, max_len alone counts, the most keys of all segments together; k_scale and v_scale multiply all of them.
struct MixedDecodeParams : DecodeParams {
  CacheSegment segments[kMostSegments];  // oldest first
  std::int32_t segment_count;
  LogitBias bias;
};

// The argument of kernels that read segments of one format of blocks and of 16 bits as they are stored. A sequence has
// one query, and where a key lies is nothing to it, but by the bias. Segments have lengths of 32 or 64 bits or the same
// one in all sequences, pages of a power of two (or none), no CSR, no scales, and rows that fill the kernel's tiles and
// can be copied in its widest units.
struct SegmentsDecodeParams : MixedDecodeParams {
  static constexpr const std::int32_t* cu_seqlens_q = nullptr;
  static constexpr std::int32_t window_left = -1, window_right = 0, clear_right = 1;
  static constexpr const float* alibi_slopes = nullptr;
  static constexpr const std::uint32_t* tree_mask = nullptr;
  static constexpr const float *k_scale = nullptr, *v_scale = nullptr;
  static constexpr std::int32_t num_chunks = 0;
};

// The argument of kernels that append, for all calls or for plain ones: `cache` has seqlens without the new keys, and
// of `append` the lengths afterwards and the copies of the queries are not made.
template <class Params>
struct AppendParamsOf : Params {
  AppendRotaryParams append;
};
using AppendDecodeParams = AppendParamsOf<DecodeParams>;
static_assert(sizeof(AppendParamsOf<PlainDecodeParamsOf<DType::kFloat16>>) == sizeof(AppendDecodeParams));

}  // namespace flashport
