#include "common/host/kv/cache_layout.h"

#include <cstring>
#include <string>

namespace flashport {
namespace {

struct KvName {
  KvFormat format;
  const char* name;
  const char* dtype;  // the element type's own name, which will do as well
};
constexpr KvName kKvNames[] = {{KvFormat::kFp32, "fp32", "float32"},
                               {KvFormat::kFp16, "fp16", "float16"},
                               {KvFormat::kBf16, "bf16", "bfloat16"},
                               {KvFormat::kFp8E4M3, "fp8_e4m3", "float8_e4m3fn"},
                               {KvFormat::kFp8E4M3Fnuz, "fp8_e4m3fnuz", "float8_e4m3fnuz"},
                               {KvFormat::kQ8_0, "q8_0", "q8_0"}};

}  // namespace

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

std::optional<KvFormat> kv_format(DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return KvFormat::kFp32;
    case DType::kFloat16: return KvFormat::kFp16;
    case DType::kBFloat16: return KvFormat::kBf16;
    case DType::kFp8E4M3: return KvFormat::kFp8E4M3;
    case DType::kFp8E4M3Fnuz: return KvFormat::kFp8E4M3Fnuz;
    case DType::kUInt8: return KvFormat::kQ8_0;
    default: return std::nullopt;
  }
}

const char* kv_name(KvFormat format) {
  for (const KvName& row : kKvNames) {
    if (row.format == format) return row.name;
  }
  return "unknown";
}

std::optional<KvFormat> kv_format_named(const char* name) {
  for (const KvName& row : kKvNames) {
    if (std::strcmp(row.name, name) == 0 || std::strcmp(row.dtype, name) == 0) return row.format;
  }
  return std::nullopt;
}

void check_scale_shape(const Check& check, const std::optional<TensorView>& scale, const char* name,
                       std::int64_t num_kv_heads) {
  if (!scale || scale->rank == 0 || scale->shape[0] == 1 || scale->shape[0] == num_kv_heads) return;
  check.value_error(std::string(name) + " must have shape (1,) or (num_kv_heads,) = (" + std::to_string(num_kv_heads) +
                    ",), got " + shape_text(*scale));
}

CacheParams cache_params(const Check& check, const TensorView& view, const char* name, CacheAxes axes,
                         std::int64_t head_dim) {
  check.inner_contiguous(view, name);
  check.readable(view, name);
  const std::int64_t size = element_size(view.dtype);
  CacheParams cache{};
  cache.data = view.data;
  cache.page_stride = view.strides[axes.page] * size;
  cache.token_stride = axes.token < 0 ? 0 : view.strides[axes.token] * size;
  cache.head_stride = view.strides[axes.head] * size;
  cache.row_bytes = static_cast<std::int32_t>(row_bytes(view.dtype, head_dim));

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
