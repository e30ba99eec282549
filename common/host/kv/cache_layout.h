// Key and value caches, whatever their layout: pages of tokens, described by byte strides.
//   contiguous  NHD (B, S, Hkv, D), HND (B, Hkv, S, D): a page is a sequence
//   paged       NHD (pages, page_size, Hkv, D), HND (pages, Hkv, page_size, D)
//   pool        (slots, Hkv, D): pages of one token
#pragma once

#include <cstdint>
#include <optional>

#include <flashport/decode.h>

#include "common/device/kv/params.h"
#include "common/host/check.h"

namespace flashport {

// Which axis of a cache tensor is what. token == -1: none, a page is one token.
struct CacheAxes {
  int page, token, head, dim;
};

// `rank` is 3 (a pool) or 4.
[[nodiscard]] CacheAxes cache_axes(int rank, KvLayout layout);
[[nodiscard]] const char* cache_axes_text(int rank, KvLayout layout, bool is_value);

// What an element type of a cache tensor stands for: uint8 carries q8_0. None: not a cache type.
[[nodiscard]] std::optional<KvFormat> kv_format(DType dtype);
[[nodiscard]] const char* kv_name(KvFormat format);
[[nodiscard]] std::optional<KvFormat> kv_format_named(const char* name);
[[nodiscard]] constexpr bool is_quantised(KvFormat format) {
  return format == KvFormat::kFp8E4M3 || format == KvFormat::kFp8E4M3Fnuz || format == KvFormat::kQ8_0;
}

// Extent of the last axis for rows of `head_dim` values; for q8_0 head_dim must be a multiple of 32.
[[nodiscard]] constexpr std::int64_t stored_extent(DType dtype, std::int64_t head_dim) {
  return dtype == DType::kUInt8 ? head_dim / 32 * 34 : head_dim;
}
// Values of a row of that extent; where q8_0 has no such rows, of the longest shorter one.
[[nodiscard]] constexpr std::int64_t stored_head_dim(DType dtype, std::int64_t extent) {
  return dtype == DType::kUInt8 ? extent / 34 * 32 : extent;
}
[[nodiscard]] constexpr std::int64_t row_bytes(DType dtype, std::int64_t head_dim) {
  return stored_extent(dtype, head_dim) * element_size(dtype);
}

// A scale is one number or, in an array of num_kv_heads, one for each head.
void check_scale_shape(const Check& check, const std::optional<TensorView>& scale, const char* name,
                       std::int64_t num_kv_heads);
[[nodiscard]] inline bool is_per_head(const TensorView& scale) { return scale.rank == 1 && scale.shape[0] != 1; }

// The memory checks of a cache (data, alignment, innermost stride 1) and its description. `view` has passed the checks
// of rank and shape.
[[nodiscard]] CacheParams cache_params(const Check& check, const TensorView& view, const char* name, CacheAxes axes,
                                       std::int64_t head_dim);

}  // namespace flashport
