// Plain structs that cross from host to device: one per kernel family, passed by value as the only kernel argument.
// Shared by every vendor's compiler, so: no methods, no std types. Cache strides are bytes (a q8_0 row has no element
// size); all other strides are elements. Every offset is 64-bit.
#pragma once

#include <cstdint>

#include <flashport/types.h>

namespace flashport {

enum class KvFormat : std::int32_t { kFp32, kFp16, kBf16, kFp8E4M3, kFp8E4M3Fnuz, kQ8_0 };
enum class MathType : std::int32_t { kFp32, kFp16, kBf16 };

// The template shape of a decode kernel; one row of cmake/decode_instances.txt.
struct DecodeShape {
  int head_dim_qk;  // tile extents: 80 and 96 ride 128 with zero fill
  int head_dim_v;
  int rows;  // query rows of a tile: 8, 16 or 64
  MathType math;
  KvFormat kv;
};

// An integer array of 32 or 64 bits an element.
struct IndexArray {
  const void* data;
  std::int32_t is_int64;  // 1 or, of 32 bits and where there is none, 0
};

// A divisor that is the same in the whole launch: dividing by it is a multiplication (tree_layout.h).
struct Divisor {
  std::uint32_t value, multiplier, shift;
};

// How a grid cuts the line of leaves (schedule.h): blocks side by side, and how many stretches and groups that makes.
struct LineCut {
  Divisor group, stretches;
  std::int32_t groups;  // of a sequence's query tiles
};

struct CacheParams {
  const void* data;
  std::int64_t page_stride;   // bytes from page to page (from sequence to sequence when contiguous)
  std::int64_t token_stride;  // bytes from token to token inside a page
  std::int64_t head_stride;   // bytes from head to head
  std::int32_t row_bytes;     // bytes of one token's row of one head
  std::int32_t copy_unit;     // 16, 8, 4 or 2: the widest copy that base, strides and row_bytes allow
};

// A tensor that is written row by row; the innermost stride is not assumed to be 1.
struct RowsOut {
  void* data;
  DType dtype;
  std::int64_t stride_seq, stride_token, stride_head, stride_dim;
};

struct DecodeParams {
  std::int32_t batch, num_q_heads, num_kv_heads, group_size;
  std::int32_t head_dim_qk, head_dim_v;
  std::int32_t row_tiles;  // ceil(group_size * max_q_len / rows)
  Divisor by_group_size, by_row_tiles;
  std::int32_t max_q_len;

  const void* q;
  DType q_dtype;
  std::int64_t q_stride_seq, q_stride_token, q_stride_head, q_stride_dim;
  const std::int32_t* cu_seqlens_q;  // null: max_q_len tokens each; else stride_seq of q, out, lse is unused

  // Lengths and pages.
  IndexArray seqlens;             // null data: lengths come from kv_indptr and kv_last_page_len
  std::int32_t max_len;           // lengths are clamped to [0, max_len]
  const std::int32_t* table;      // page (or slot) numbers; null: page = sequence
  std::int64_t table_stride;      // row stride of `table`
  IndexArray table_row;           // row of a request; null data: row = sequence
  const std::int32_t* kv_indptr;  // CSR: row b of `table` starts at kv_indptr[b]
  const std::int32_t* kv_last_page_len;
  std::int64_t page_size;
  std::int32_t page_shift;  // log2 of page_size, or -1
  CacheParams k, v;

  // Scores: s = q.k * score_scale; softcap: s = cap_scale * tanh(s * cap_inner); base 2 in the end.
  float score_scale;                       // softmax_scale * log2e, or softmax_scale / softcap with softcap
  float cap_scale;                         // softcap * log2e; 0: no softcap
  std::int32_t window_left, window_right;  // -1: infinite
  const float* alibi_slopes;
  std::int64_t alibi_stride_seq;
  const float* sinks;
  const std::uint32_t* tree_mask;
  std::int64_t tree_mask_stride;
  const float* k_scale;  // null: 1
  const float* v_scale;
  std::int32_t scale_stride;  // 0: one scale; 1: one per kv head

  RowsOut out;
  float* lse;  // null: not wanted
  std::int64_t lse_stride_seq, lse_stride_token, lse_stride_head;

  // Fixed chunks (stage 1, num_splits): chunk_keys > 0 keys each, or num_chunks equal pieces of each sequence when
  // chunk_keys is 0. num_chunks == 0: the invariant schedule. In chunk mode out and lse gain a chunk axis:
  std::int32_t num_chunks;
  std::int64_t chunk_keys;
  std::int64_t out_stride_chunk, lse_stride_chunk;
  std::int32_t write_empty_chunks;  // write out 0 and lse -inf for chunks past the end of a sequence

  // Workspace of the invariant schedule (common/device/split_tree.h).
  float* slots;
  std::int32_t slot_floats;  // floats of one partial state
  std::uint32_t* counters;
  std::int32_t levels;
  LineCut cuts[2];  // a block for itself; tiles of a sequence side by side
};

// Stage 2: out = merge over chunks of (mid, mid_lse).
struct Stage2Params {
  std::int32_t batch, num_heads, head_dim, tokens;  // tokens: q_len of a split decode, 1 in LightLLM's stage 2
  const float* mid;
  std::int64_t mid_stride_seq, mid_stride_token, mid_stride_head, mid_stride_chunk, mid_stride_dim;
  const float* mid_lse;
  std::int64_t mid_lse_stride_seq, mid_lse_stride_token, mid_lse_stride_head, mid_lse_stride_chunk;
  IndexArray seqlens;
  std::int64_t chunk_keys;  // > 0: chunks = ceil(len / chunk_keys), clamped to max_chunks; 0: all max_chunks
  std::int32_t max_chunks;
  const std::int32_t* end;  // sequences (rows of a ragged q) from *end on are nobody's and not written; null: none
  RowsOut out;
  float* lse;
  std::int64_t lse_stride_seq, lse_stride_token, lse_stride_head;
};

// merge_states over the leading axis; rows = product of the middle axes, each addressed through two strides at most
// after the host has collapsed them (row = outer * inner_rows + inner).
struct MergeStatesParams {
  std::int32_t states, head_dim;
  std::int64_t rows, inner_rows;
  DType dtype;
  const void* o[2];  // states == 2 may come as two tensors; else o[0] with o_stride_state
  const float* lse[2];
  std::int32_t two_tensors;
  std::int64_t o_stride_state, o_stride_outer[2], o_stride_inner[2], o_stride_dim[2];
  std::int64_t lse_stride_state, lse_stride_outer[2], lse_stride_inner[2];
  void* out;
  std::int64_t out_stride_outer, out_stride_inner, out_stride_dim;
  float* out_lse;
  std::int64_t out_lse_stride_outer, out_lse_stride_inner;
  std::int32_t lse_base_2;
};

struct AppendSide {
  const void* src;
  std::int64_t src_stride_token, src_stride_head, src_stride_dim;
  void* cache;
  std::int64_t page_stride, token_stride, head_stride;  // bytes, as CacheParams
  const float* scale;                                   // null: 1
  std::int32_t scale_stride;
  std::int32_t head_dim;
};

struct AppendParams {
  std::int64_t tokens;
  std::int32_t num_kv_heads;
  DType src_dtype;
  KvFormat kv;
  IndexArray slots;
  std::int64_t num_slots;  // a slot outside [0, num_slots) is skipped
  std::int64_t page_size;
  AppendSide k, v;
};

// A plain streaming read of `bytes` bytes (16-byte units): the ceiling of memory-bound kernels. The kernel keeps its
// sum alive by storing it if `bytes` is negative, which it never is.
struct ReadBandwidthParams {
  void* data;
  std::int64_t bytes;
};

}  // namespace flashport
