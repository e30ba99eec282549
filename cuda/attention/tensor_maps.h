// The tensor maps of q, k and v, which the host encodes for each launch.
#pragma once

#include "common/device/attention/params.h"
#include "cuda/runtime/tensor_map.h"

namespace flashport::cuda_attention {

// (columns, tokens, heads, sequences)
inline cuda_runtime::BoxedTensor boxed(const StridedRows& rows, int columns, std::int64_t tokens, int heads,
                                       std::int64_t sequences, int box_rows) {
  return {rows.data,
          {columns, tokens, heads, sequences},
          {2 * rows.stride_token, 2 * rows.stride_head, 2 * rows.stride_seq},
          box_rows};
}

// A KernelEntry::prepare. has_maps stays 0 where TMA cannot read all three tensors.
template <int kRows, int kKeys>
const char* encode_maps(void* params) {
  AttentionParams& p = *static_cast<AttentionParams*>(params);
  p.has_maps = 0;
  if (p.total_q == 0 || p.total_k == 0) return nullptr;
  const bool packed = p.cu_seqlens_q != nullptr;
  const std::int64_t sequences = packed ? 1 : p.batch;
  const std::int64_t queries = packed ? p.total_q : p.q_len, keys = packed ? p.total_k : p.kv_len;
  const cuda_runtime::BoxedTensor tensors[3] = {boxed(p.q, p.head_dim_qk, queries, p.num_q_heads, sequences, kRows),
                                                boxed(p.k, p.head_dim_qk, keys, p.num_kv_heads, sequences, kKeys),
                                                boxed(p.v, p.head_dim_v, keys, p.num_kv_heads, sequences, kKeys)};
  TensorMap* maps[3] = {&p.q_map, &p.k_map, &p.v_map};
  bool all_readable = true;
  for (int i = 0; i < 3; ++i) {
    bool readable = false;
    if (const char* error = cuda_runtime::encode_map(tensors[i], *maps[i], readable)) return error;
    all_readable = all_readable && readable;
  }
  p.has_maps = all_readable ? 1 : 0;
  return nullptr;
}

}  // namespace flashport::cuda_attention
