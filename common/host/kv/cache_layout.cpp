#include "common/host/kv/cache_layout.h"

#include <algorithm>
#include <string>

namespace flashport {
namespace {

std::string quoted(KvFormat format) { return std::string("\"") + kv_format_name(format) + "\""; }

// The formats of blocks that come as this type: "k_format=\"q8_0\", \"q4_0\" or \"q4_1\"".
std::string choices(DType dtype, const char* format_name) {
  std::string text, last;
  for (int i = 0; i < kKvFormats; ++i) {
    const auto format = static_cast<KvFormat>(i);
    if (kv_format_trait(format).dtype != dtype || kv_format_trait(format).block_values == 1) continue;
    if (!last.empty()) text += (text.empty() ? "" : ", ") + last;
    last = quoted(format);
  }
  if (last.empty()) return "";
  return std::string(format_name) + "=" + text + (text.empty() ? "" : " or ") + last;
}

}  // namespace

const char* kv_format_name(KvFormat format) { return kv_format_trait(format).name; }

CacheAxes cache_axes(int rank, KvLayout layout) {
  if (rank == 3) return {0, -1, 1, 2};
  return layout == KvLayout::kNHD ? CacheAxes{0, 1, 2, 3} : CacheAxes{0, 2, 1, 3};
}

const char* cache_axes_text(int rank, KvLayout layout, bool is_value) {
  if (rank == 3) return is_value ? "(slots, num_kv_heads, head_dim_v)" : "(slots, num_kv_heads, head_dim)";
  if (layout == KvLayout::kNHD) {
    return is_value ? "(pages or batch, page_size or length, num_kv_heads, head_dim_v)"
                    : "(pages or batch, page_size or length, num_kv_heads, head_dim)";
  }
  return is_value ? "(pages or batch, num_kv_heads, page_size or length, head_dim_v)"
                  : "(pages or batch, num_kv_heads, page_size or length, head_dim)";
}

std::optional<KvFormat> own_format(DType dtype) {
  for (int i = 0; i < kKvFormats; ++i) {
    const auto format = static_cast<KvFormat>(i);
    if (kv_format_trait(format).dtype == dtype && kv_format_trait(format).block_values == 1) return format;
  }
  return std::nullopt;
}

std::string kv_formats_text(KvFormat k, KvFormat v) {
  if (k == v) return std::string("kv=") + kv_format_name(k);
  return std::string("k=") + kv_format_name(k) + " with v=" + kv_format_name(v);
}

KvFormat cache_format(const Check& check, const TensorView& cache, const char* name, std::optional<KvFormat> named,
                      const char* format_name) {
  if (named) {
    if (!is_cache_format(*named)) {
      check.value_error(std::string(format_name) + " must be a format that caches have, got " + quoted(*named));
    }
    const DType carrier = kv_format_trait(*named).dtype;
    if (cache.dtype != carrier) {
      check.type_error(std::string(name) + " must be " + dtype_name(carrier) + " for " + format_name + "=" +
                       quoted(*named) + ", got " + dtype_name(cache.dtype) + "; pass the format that it has, or none " +
                       "for its element type's own");
    }
    return *named;
  }
  if (const std::optional<KvFormat> own = own_format(cache.dtype)) return *own;
  if (const std::string blocks = choices(cache.dtype, format_name); !blocks.empty()) {
    check.value_error(std::string(format_name) + " must say what " + name + " of " + dtype_name(cache.dtype) +
                      " stores, got none; pass " + blocks);
  }
  return KvFormat::kFp32;
}

std::string block_problem(KvFormat format, const char* name, std::int64_t head_dim) {
  const int values = kv_format_trait(format).block_values;
  if (head_dim % values == 0) return "";
  return std::string(kv_format_name(format)) + " needs a " + name + " that is a multiple of " + std::to_string(values) +
         ", got " + std::to_string(head_dim);
}

void check_scale_shape(const Check& check, const std::optional<TensorView>& scale, const char* name,
                       std::int64_t num_kv_heads) {
  if (!scale || scale->rank == 0 || scale->shape[0] == 1 || scale->shape[0] == num_kv_heads) return;
  check.value_error(std::string(name) + " must have shape (1,) or (num_kv_heads,) = (" + std::to_string(num_kv_heads) +
                    ",), got " + shape_text(*scale));
}

void check_head_scale(const Check& check, const std::optional<TensorView>& scale, const char* name, std::int64_t batch,
                      std::int64_t num_kv_heads) {
  if (scale && scale->rank == 2) {
    check.shape(*scale, name, "(batch, num_kv_heads)", {batch, num_kv_heads});
  } else {
    check_scale_shape(check, scale, name, num_kv_heads);
  }
}

HeadScales head_scales(const std::optional<TensorView>& scale) {
  if (!scale) return {};
  const auto stride = [&](int axis) { return scale->shape[axis] == 1 ? 0 : scale->strides[axis]; };
  return {static_cast<const float*>(scale->data), scale->rank == 2 ? stride(0) : 0,
          scale->rank == 0 ? 0 : stride(scale->rank - 1)};
}

bool is_row_scale(const TensorView& scale, const TensorView& cache) {
  return scale.rank == cache.rank - 1 && std::equal(scale.shape, scale.shape + scale.rank, cache.shape);
}

bool is_group_scale(const TensorView& scale, const TensorView& cache, std::int64_t head_dim) {
  if (scale.rank != cache.rank || !std::equal(scale.shape, scale.shape + scale.rank - 1, cache.shape)) return false;
  const std::int64_t groups = scale.shape[scale.rank - 1];
  return groups > 0 && head_dim % groups == 0 && head_dim / groups % 8 == 0;
}

bool lies_beside(const std::optional<TensorView>& scale, const TensorView& cache) {
  return scale && scale->rank >= 2 && scale->rank >= cache.rank - 1;
}

std::string beside_text(const char* cache_name) {
  return std::string("that of ") + cache_name + " without its last axis, or that of " + cache_name +
         " with a group of 8 values or a multiple of it in place of each value";
}

void check_cache_scale(const Check& check, const std::optional<TensorView>& scale, const char* name,
                       const TensorView& cache, const char* cache_name, std::int64_t num_kv_heads,
                       std::int64_t head_dim) {
  if (!scale || scale->rank == 0) return;
  if (scale->rank == 1 && (scale->shape[0] == 1 || scale->shape[0] == num_kv_heads)) return;
  if (is_row_scale(*scale, cache) || is_group_scale(*scale, cache, head_dim)) return;
  check.value_error(std::string(name) + " must have shape (1,), (num_kv_heads,) = (" + std::to_string(num_kv_heads) +
                    ",), " + beside_text(cache_name) + ", got " + shape_text(*scale) + " for " + cache_name + " " +
                    shape_text(cache));
}

KeyScales key_scales(const std::optional<TensorView>& scale, const TensorView& cache, CacheAxes axes,
                     std::int64_t head_dim) {
  KeyScales scales{};
  scales.dtype = DType::kFloat32;
  if (!scale) return scales;
  scales.data = scale->data;
  scales.dtype = scale->dtype;
  if (scale->rank < cache.rank - 1) {
    if (is_per_head(*scale)) scales.stride_head = scale->strides[0];
    return scales;
  }
  // A stride that no index above 0 is multiplied with is 0.
  const auto stride = [&](int axis) { return scale->shape[axis] > 1 ? scale->strides[axis] : 0; };
  scales.stride_page = stride(axes.page);
  if (axes.token >= 0) scales.stride_token = stride(axes.token);
  scales.stride_head = stride(axes.head);
  if (scale->rank == cache.rank && scale->shape[axes.dim] > 1) {  // else one for the whole row
    scales.stride_group = scale->strides[axes.dim];
    scales.dims_per_scale = static_cast<std::int32_t>(head_dim / scale->shape[axes.dim]);
  }
  return scales;
}

CacheParams cache_params(const Check& check, const TensorView& view, const char* name, CacheAxes axes, KvFormat format,
                         std::int64_t head_dim) {
  check.inner_contiguous(view, name);
  check.readable(view, name);
  const std::int64_t size = element_size(view.dtype);
  CacheParams cache{};
  cache.data = view.data;
  cache.page_stride = view.strides[axes.page] * size;
  cache.token_stride = axes.token < 0 ? 0 : view.strides[axes.token] * size;
  cache.head_stride = view.strides[axes.head] * size;
  cache.row_bytes = static_cast<std::int32_t>(stored_extent(format, head_dim) * size);

  // A stride that no index above 0 is multiplied with does not count.
  std::uint64_t bits = static_cast<std::uint64_t>(cache.row_bytes);
  if (has_elements(view)) bits |= reinterpret_cast<std::uintptr_t>(view.data);
  const int strided[] = {axes.page, axes.token, axes.head};
  for (int axis : strided) {
    if (axis >= 0 && view.shape[axis] > 1) bits |= static_cast<std::uint64_t>(view.strides[axis] * size);
  }
  for (std::int32_t unit = 16; unit >= 2; unit /= 2) {
    if (bits % static_cast<std::uint64_t>(unit) == 0) {
      cache.copy_unit = unit;
      return cache;
    }
  }
  check.value_error(std::string(name) + " must have its data and all rows at even addresses, got strides " +
                    tuple_text(view.strides, view.rank) + " of " + std::to_string(size) + "-byte elements");
}

}  // namespace flashport
