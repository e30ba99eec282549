// The tensor maps of q, k, v and the bias, which the host encodes for each launch.
#pragma once

#include "common/device/attention/config.h"
#include "common/device/attention/params.h"
#include "cuda/attention/stored_rows.h"
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
inline cuda_runtime::BoxedTensor boxed(const CacheParams& cache, int columns, std::int64_t tokens, int heads,
                                       std::int64_t sequences, int box_rows) {
  return {cache.data,
          {columns, tokens, heads, sequences},
          {cache.token_stride, cache.head_stride, cache.page_stride},
          box_rows};
}

// (keys, queries, heads, sequences) of a bias of 16 bits; those that all heads or sequences share have one.
inline const char* encode_bias_map(AttentionParams& p) {
  BiasParams& bias = p.bias;
  bias.has_map = 0;
  if (bias.dtype == DType::kFloat32) return nullptr;
  const cuda_runtime::BoxedTensor tensor = {
      const_cast<void*>(bias.data),
      {p.kv_len, p.q_len, bias.stride_head == 0 ? 1 : p.num_q_heads, bias.stride_seq == 0 ? 1 : p.batch},
      {2 * bias.stride_row, 2 * bias.stride_head, 2 * bias.stride_seq},
      64};
  bool readable = false;
  if (const char* error = cuda_runtime::encode_map(tensor, p.bias_map, readable)) return error;
  bias.has_map = readable ? 1 : 0;
  return nullptr;
}

// (columns, tokens of a page, heads, pages); a sequence, or all packed ones, are a page where there is no table.
struct KeyExtents {
  std::int64_t tokens, pages;
};
inline KeyExtents key_extents(const AttentionParams& p) {
  if (p.cache.table != nullptr) return {p.cache.page_size, p.total_k / p.cache.page_size};
  if (p.cu_seqlens_k != nullptr) return {p.total_k, 1};
  return {p.kv_len, p.batch};
}
// Keys of a box, at least the swizzle's period; a box that comes to shared memory begins where 128 divides the address.
inline constexpr int kLeastBoxKeys = 8;
template <int kKeys>
std::int32_t box_keys_of(const AttentionParams& p) {
  if (p.cache.table == nullptr) return kKeys;
  std::int64_t keys = kKeys, rest = p.cache.page_size;  // their greatest common divisor, without <numeric> (enums.h)
  while (rest != 0) {
    const std::int64_t next = keys % rest;
    keys = rest;
    rest = next;
  }
  return static_cast<std::int32_t>(keys);
}

inline bool is_stored_narrow(KvFormat format) { return format != KvFormat::kFp16 && format != KvFormat::kBf16; }

// Rows of a cache as bytes. TMA wants strides and first bytes of boxes that 16 divides. Heads that lie apart by another
// stride (q8_0 has 136 bytes) are parts of a token's row, and tokens that do are parts of a pair's; boxes of those that
// begin 8 bytes later begin 8 bytes early, which rows of odd multiples of 8 bytes leave room for.
inline const char* encode_stored_map(const AttentionParams& p, const CacheParams& cache, TensorMap& map, StoredBox& box,
                                     bool& readable) {
  const KeyExtents extents = key_extents(p);
  cuda_runtime::BoxedTensor tensor =
      boxed(cache, cache.row_bytes, extents.tokens, p.num_kv_heads, extents.pages, p.box_keys);
  box = {.row_bytes = stored_row_pitch(cache.row_bytes), .head_bytes = 0, .pair_bytes = 0};
  if (p.num_kv_heads > 1 && cache.head_stride % 16 != 0) {
    tensor.extents[0] = (p.num_kv_heads - 1) * cache.head_stride + cache.row_bytes;
    tensor.extents[2] = 1;
    box.head_bytes = static_cast<std::int32_t>(cache.head_stride);
    readable = cache.head_stride > 0 && cache.head_stride % 8 == 0 && tensor.extents[0] <= cache.token_stride;
    if (!readable) return nullptr;
  }
  constexpr int kLeastPairedKeys = 2 * kLeastBoxKeys;
  if (cache.token_stride % 16 == 8 && extents.tokens % 2 == 0 && p.box_keys % kLeastPairedKeys == 0) {
    box.pair_bytes = static_cast<std::int32_t>(cache.token_stride);
    tensor.extents[0] += cache.token_stride;
    tensor.extents[1] /= 2;
    tensor.strides[0] *= 2;
    tensor.box_rows /= 2;
  }
  readable = cache.row_bytes % 16 == 8 || (box.head_bytes == 0 && box.pair_bytes == 0);
  if (!readable) return nullptr;
  tensor.box_bytes = box.row_bytes;
  return cuda_runtime::encode_map(tensor, map, readable);
}

// Boxes of rows of fewer bits, of whole heads.
template <int kKeys>
const char* encode_stored_maps(AttentionParams& p) {
  const std::int32_t keys = box_keys_of<kKeys>(p);
  p.box_keys = keys < kStoredRows ? keys : kStoredRows;
  const bool whole = p.head_dim_qk == kStoredDim && p.head_dim_v == kStoredDim;
  if (!whole || p.box_keys % kLeastBoxKeys != 0 || (p.cache.table != nullptr && p.leftpad_k != nullptr)) return nullptr;
  const auto have_slots = [](const KeyScales& scales, KvFormat format) {
    return come_to_slots(scales, reinterpret_cast<std::uintptr_t>(scales.data), format);
  };
  if (!have_slots(p.k_row_scales, p.k_format) || !have_slots(p.v_row_scales, p.v_format)) return nullptr;
  bool k_readable = false, v_readable = false;
  StoredBox k_box, v_box;
  if (const char* error = encode_stored_map(p, p.cache.k, p.k_map, k_box, k_readable)) return error;
  if (const char* error = encode_stored_map(p, p.cache.v, p.v_map, v_box, v_readable)) return error;
  if (k_readable && v_readable) {
    p.k_box = k_box;
    p.v_box = v_box;
  }
  return nullptr;
}

// A KernelEntry::prepare. The flags say which maps there are: of rows of the math type that TMA can read, keys and
// values not on pages.
template <MathType kMath, ScoreForm kForm, int kRows, int kKeys, bool kStores>
const char* encode_maps(void* params) {
  AttentionParams& p = *static_cast<AttentionParams*>(params);
  constexpr bool kIsHalf = kMath == MathType::kFp16;
  constexpr DType kDType = kIsHalf ? DType::kFloat16 : DType::kBFloat16;
  constexpr KvFormat kFormat = kIsHalf ? KvFormat::kFp16 : KvFormat::kBf16;
  p.has_q_map = p.has_kv_maps = 0;
  p.k_box = p.v_box = {};
  if (p.total_q == 0 || p.total_k == 0) return nullptr;
  if constexpr (kForm == ScoreForm::kBias) {
    if (const char* error = encode_bias_map(p)) return error;
  }
  const bool converts = kStores && kIsHalf && p.q.dtype == DType::kBFloat16;  // QueryProducer, beside boxes of keys
  if (p.q.dtype == kDType || converts) {
    const bool packed = p.cu_seqlens_q != nullptr;
    const std::int64_t tokens = packed ? p.total_q : p.q_len;
    const cuda_runtime::BoxedTensor q = boxed(p.q, p.head_dim_qk, tokens, p.num_q_heads, packed ? 1 : p.batch, kRows);
    bool readable = false;
    if (const char* error = cuda_runtime::encode_map(q, p.q_map, readable)) return error;
    p.has_q_map = readable ? 1 : 0;
  }
  // Where a warp brings biases, none is left that brings queries beside boxes of keys and values.
  if constexpr (kForm == ScoreForm::kBias) {
    if (p.has_q_map == 0) return nullptr;
  }
  if constexpr (kStores) {
    const bool narrow = is_stored_narrow(p.k_format) && is_stored_narrow(p.v_format);
    const char* error = narrow ? encode_stored_maps<kKeys>(p) : nullptr;
    if (converts && p.k_box.row_bytes == 0) p.has_q_map = 0;
    if (narrow || error != nullptr) return error;
  }
  if (p.k_row_scales.data != nullptr || p.v_row_scales.data != nullptr) return nullptr;  // they come with rows
  if (p.k_format != kFormat || p.v_format != kFormat) return nullptr;
  const bool paged = p.cache.table != nullptr;
  const auto [tokens, pages] = key_extents(p);
  p.box_keys = box_keys_of<kKeys>(p);
  if (p.box_keys % kLeastBoxKeys != 0 || (paged && (p.leftpad_k != nullptr || p.has_q_map == 0))) return nullptr;
  bool k_readable = false, v_readable = false;
  const cuda_runtime::BoxedTensor k = boxed(p.cache.k, p.head_dim_qk, tokens, p.num_kv_heads, pages, p.box_keys);
  if (const char* error = cuda_runtime::encode_map(k, p.k_map, k_readable)) return error;
  const cuda_runtime::BoxedTensor v = boxed(p.cache.v, p.head_dim_v, tokens, p.num_kv_heads, pages, p.box_keys);
  if (const char* error = cuda_runtime::encode_map(v, p.v_map, v_readable)) return error;
  p.has_kv_maps = k_readable && v_readable ? 1 : 0;
  return nullptr;
}

}  // namespace flashport::cuda_attention
