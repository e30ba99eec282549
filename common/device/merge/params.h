// The arguments of the kernels that merge partial results.
#pragma once

#include "common/device/core/types.h"

namespace flashport {

// Stage 2: out = merge over chunks of (mid, mid_lse).
struct Stage2Params {
  std::int32_t batch, num_heads, head_dim, tokens;  // tokens: q_len of a split decode, 1 in LightLLM's stage 2
  StridedRows mid;                                  // fp32
  std::int64_t mid_stride_chunk;
  StridedRows mid_lse;  // fp32, one number a row
  std::int64_t mid_lse_stride_chunk;
  std::int32_t max_chunks;
  IndexArray seqlens;
  std::int64_t chunk_keys;  // > 0: chunks = ceil(len / chunk_keys), clamped to max_chunks; 0: all max_chunks
  const std::int32_t* end;  // sequences (rows of a ragged q) from *end on do not exist and are not written; null: none
  StridedRows lse;          // fp32, one number a row; null data: not wanted
  StridedRows out;
};

// merge_states over the leading axis; rows = product of the middle axes, which the host has
// collapsed so that two strides address them (row = outer * inner_rows + inner).
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

}  // namespace flashport
