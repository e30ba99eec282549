// Key and value caches, whatever their layout: pages of tokens, described by byte strides.
//   contiguous  NHD (B, S, Hkv, D), HND (B, Hkv, S, D): a page is a sequence
//   paged       NHD (pages, page_size, Hkv, D), HND (pages, Hkv, page_size, D)
//   pool        (slots, Hkv, D): pages of one token
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include <flashport/decode.h>

#include "common/device/kv/params.h"
#include "common/host/arguments.h"
#include "common/host/check.h"

namespace flashport {

// Which axis of a cache tensor is what. token == -1: none, a page is one token.
struct CacheAxes {
  int page, token, head, dim;
};

// `rank` is 3 (a pool) or 4.
[[nodiscard]] CacheAxes cache_axes(int rank, KvLayout layout);
[[nodiscard]] const char* cache_axes_text(int rank, KvLayout layout, bool is_value);

// The format that an element type has by itself. None: those of blocks, which carry whatever they are said to, and
// types that no cache has.
[[nodiscard]] std::optional<KvFormat> own_format(DType dtype);
[[nodiscard]] constexpr bool is_quantised(KvFormat format) {
  const KvFormatTrait trait = kv_format_trait(format);
  return trait.block_bytes < 2 * trait.block_values;
}
[[nodiscard]] constexpr bool is_sixteen_bit(KvFormat format) {
  return format == KvFormat::kFp16 || format == KvFormat::kBf16;
}
// The formats of K and V: "kv=q8_0", or where they differ "k=q8_0 with v=bf16".
[[nodiscard]] std::string kv_formats_text(KvFormat k, KvFormat v);

// Bytes of 32 values, which kernels that write take at a time.
[[nodiscard]] constexpr std::int32_t unit_bytes(KvFormat format) { return kv_row_bytes(format, 32); }

// Elements of the carrying tensor that a block takes.
[[nodiscard]] constexpr int block_elements(KvFormat format) {
  const KvFormatTrait trait = kv_format_trait(format);
  return trait.block_bytes / element_size(trait.dtype);
}
// Extent of the last axis for rows of `head_dim` values, a multiple of a block's.
[[nodiscard]] constexpr std::int64_t stored_extent(KvFormat format, std::int64_t head_dim) {
  return head_dim / kv_format_trait(format).block_values * block_elements(format);
}
// Values of a row of that extent; where the format has no such rows, of the longest shorter one.
[[nodiscard]] constexpr std::int64_t stored_head_dim(KvFormat format, std::int64_t extent) {
  return extent / block_elements(format) * kv_format_trait(format).block_values;
}

// The format of a cache: the one named, else its element type's own. Throws where the type does not carry what is
// named, and where it has none of its own and nothing is named. A type that no cache has counts as of one value an
// element: the check of types refuses it.
[[nodiscard]] KvFormat cache_format(const Check& check, const TensorView& cache, const char* name,
                                    std::optional<KvFormat> named, const char* format_name);
// Empty, or why rows of the format have no such head dim; `name` is that of the dim.
[[nodiscard]] std::string block_problem(KvFormat format, const char* name, std::int64_t head_dim);

// A scale of a whole cache is one number or, in an array of num_kv_heads, one for each head.
void check_scale_shape(const Check& check, const std::optional<TensorView>& scale, const char* name,
                       std::int64_t num_kv_heads);
[[nodiscard]] inline bool is_per_head(const TensorView& scale) { return scale.rank == 1 && scale.shape[0] != 1; }

// The same where sequences may have factors of their own: it may also be (batch, num_kv_heads).
void check_head_scale(const Check& check, const std::optional<TensorView>& scale, const char* name, std::int64_t batch,
                      std::int64_t num_kv_heads);
// Such a scale, of a shape that has been checked.
[[nodiscard]] HeadScales head_scales(const std::optional<TensorView>& scale);

// Scales that lie beside a cache: one for each row, on the axes of the cache without its last; or on all of them one
// for each group of 8 values of a row or a multiple of 8.
[[nodiscard]] bool is_row_scale(const TensorView& scale, const TensorView& cache);
[[nodiscard]] bool is_group_scale(const TensorView& scale, const TensorView& cache, std::int64_t head_dim);
// Whether a scale is one of those, by its rank.
[[nodiscard]] bool lies_beside(const std::optional<TensorView>& scale, const TensorView& cache);
// The shapes of those in words.
[[nodiscard]] std::string beside_text(const char* cache_name);
// The row of a scale in a table of arguments: read where it is of the whole cache, else as `beside` says.
template <std::size_t kMost>
void add_scale_argument(ArgumentTable<kMost>& table, const std::optional<TensorView>& scale, const char* name,
                        const TensorView& cache, Access beside) {
  if (lies_beside(scale, cache)) {
    table.add(scale, name, beside, {DType::kFloat32, DType::kFloat16}, Strides::kAny);
  } else {
    table.add(scale, name, kRead, {DType::kFloat32}, Strides::kContiguous, {1, "(1 or num_kv_heads)", Rank::kOrScalar});
  }
}
// The same where sequences may have factors of their own, and the caller says whether the scale lies beside.
template <std::size_t kMost>
void add_head_scale_argument(ArgumentTable<kMost>& table, const std::optional<TensorView>& scale, const char* name,
                             bool is_beside) {
  if (is_beside) {
    table.add(scale, name, kRead, {DType::kFloat32, DType::kFloat16}, Strides::kAny);
  } else {
    table.add(scale, name, kRead, {DType::kFloat32}, Strides::kAny, {1, "(1 or num_kv_heads)", Rank::kOrScalar},
              {2, "(batch, num_kv_heads)"});
  }
}
// A scale is of the whole cache or lies beside it.
void check_cache_scale(const Check& check, const std::optional<TensorView>& scale, const char* name,
                       const TensorView& cache, const char* cache_name, std::int64_t num_kv_heads,
                       std::int64_t head_dim);
// Any scale of a cache, of a shape that has been checked.
[[nodiscard]] KeyScales key_scales(const std::optional<TensorView>& scale, const TensorView& cache, CacheAxes axes,
                                   std::int64_t head_dim);

// The memory checks of a cache (data, alignment, innermost stride 1) and its description. `view` has passed the checks
// of rank and shape.
[[nodiscard]] CacheParams cache_params(const Check& check, const TensorView& view, const char* name, CacheAxes axes,
                                       KvFormat format, std::int64_t head_dim);

}  // namespace flashport
