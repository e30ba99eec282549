#include "cuda/runtime/tensor_maps.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "common/host/backend_support.h"

namespace flashport::cuda_runtime {
namespace {

// The driver's function, which the runtime finds: nothing links the driver.
using Encode = decltype(&cuTensorMapEncodeTiled);
Encode find_encode() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t code =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
  return code == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(function) : nullptr;
}

// The tensor as (columns, tokens, heads, sequences), the fastest first.
struct Box {
  const StridedRows& rows;
  std::int64_t extents[4];
  int box_rows;
};

// Axes of one element are never stepped along; their strides are what TMA takes.
bool strides_of(const Box& box, cuuint64_t (&strides)[3]) {
  constexpr std::int64_t kMost = std::int64_t{1} << 40;
  const std::int64_t bytes[3] = {2 * box.rows.stride_token, 2 * box.rows.stride_head, 2 * box.rows.stride_seq};
  for (int axis = 0; axis < 3; ++axis) {
    const bool single = box.extents[axis + 1] == 1;
    if (!single && (bytes[axis] <= 0 || bytes[axis] % 16 != 0 || bytes[axis] >= kMost)) return false;
    strides[axis] = static_cast<cuuint64_t>(single ? 16 : bytes[axis]);
  }
  return reinterpret_cast<std::uintptr_t>(box.rows.data) % 16 == 0;
}

const char* encode(Encode function, const Box& box, TensorMap& map, bool& readable) {
  cuuint64_t strides[3];
  readable = strides_of(box, strides);
  if (!readable) return nullptr;
  cuuint64_t extents[4];
  std::copy_n(box.extents, 4, extents);
  const cuuint32_t box_extents[4] = {64, static_cast<cuuint32_t>(box.box_rows), 1, 1};
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  static_assert(sizeof(CUtensorMap) == sizeof(TensorMap));
  const CUresult result =
      function(reinterpret_cast<CUtensorMap*>(&map), CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, box.rows.data, extents,
               strides, box_extents, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
               CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return nullptr;
  return keep_error("cuTensorMapEncodeTiled: code " + std::to_string(static_cast<int>(result)));
}

}  // namespace

const char* encode_maps(AttentionParams& p, int rows, int keys) {
  p.has_maps = 0;
  static const Encode function = find_encode();
  if (function == nullptr || p.total_q == 0 || p.total_k == 0) return nullptr;
  const bool packed = p.cu_seqlens_q != nullptr;
  const std::int64_t seqs = packed ? 1 : p.batch;
  const std::int64_t queries = packed ? p.total_q : p.q_len, all_keys = packed ? p.total_k : p.kv_len;
  const Box q = {p.q, {p.head_dim_qk, queries, p.num_q_heads, seqs}, rows};
  const Box k = {p.k, {p.head_dim_qk, all_keys, p.num_kv_heads, seqs}, keys};
  const Box v = {p.v, {p.head_dim_v, all_keys, p.num_kv_heads, seqs}, keys};
  bool readable[3] = {};
  if (const char* error = encode(function, q, p.q_map, readable[0])) return error;
  if (const char* error = encode(function, k, p.k_map, readable[1])) return error;
  if (const char* error = encode(function, v, p.v_map, readable[2])) return error;
  p.has_maps = readable[0] && readable[1] && readable[2] ? 1 : 0;
  return nullptr;
}

}  // namespace flashport::cuda_runtime
