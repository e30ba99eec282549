// Writes new tokens into a cache, in the format of each side: stored = value / scale. A thread takes one unit of a row:
// 32 values, which are a block in the formats that have blocks (blocks.h). There are two kernels: append_any writes
// every format, append_kv those that take few registers, which are fp32, fp16, bf16, fp8 e4m3 and q8_0.
#pragma once

#include "common/device/core/scalar_access.h"
#include "common/device/core/strided_offset.h"
#include "common/device/kv/paged_kv.h"
#include "common/device/kv/scaled_rows.h"

namespace flashport::FLASHPORT_TARGET::kv {

inline constexpr int kAppendUnit = kBlockValues;

// Writes the `count` values of the unit that begins at `to`.
template <bool kAny>
FLASHPORT_DEVICE void store_unit(KvFormat format, char* to, const float* x, int count) {
  if (kAny && is_block_format(format)) return store_block(format, to, x);
  if (!kAny && format == KvFormat::kQ8_0) return store_q8_0_block(to, x);
  if constexpr (kAny) {
    FLASHPORT_UNROLL(32)
    for (int i = 0; i < kAppendUnit; ++i) {
      if (i < count) store_any_value(format, to, i, x[i]);
    }
  } else {
    for (int i = 0; i < count; ++i) store_value(format, to, i, x[i]);
  }
}

template <bool kAny>
FLASHPORT_DEVICE void append_side(const AppendSide& side, std::int64_t token, int head, int unit, TokenCoord coord) {
  const int first = unit * kAppendUnit;
  const int count = minimum(kAppendUnit, side.head_dim - first);
  if (count <= 0) return;
  if constexpr (kAny) {
    if (side.row_scales.data != nullptr) {
      char* to = static_cast<char*>(side.cache.data) + row_offset(side.cache, coord, head) + unit * side.unit_bytes;
      const NumberRow row{side.rows.data, side.rows.dtype, strided_offset(side.rows, 0, token, head),
                          side.rows.stride_dim, side.head_dim};
      return store_scaled_unit(side.format, to, row, first, count, side.row_scales,
                               scale_element(side.row_scales, coord, head));
    }
  }
  const float scale = head_scale(side.scale, side.scale_stride, head);
  const std::int64_t stride = side.rows.stride_dim;
  const std::int64_t from = strided_offset(side.rows, 0, token, head) + first * stride;
  float x[kAppendUnit];
  for (int i = 0; i < kAppendUnit; ++i) {
    x[i] = i < count ? load_as_float(side.rows.data, side.rows.dtype, from + i * stride) / scale : 0.0f;
  }
  char* row = static_cast<char*>(side.cache.data) + row_offset(side.cache, coord, head);
  store_unit<kAny>(side.format, row + unit * side.unit_bytes, x, count);
}

// A thread writes the K and V of one unit, head and token; units are counted fastest, then heads, then tokens.
template <int kThreads, bool kAny>
FLASHPORT_DEVICE void append_kv(const AppendParams& p, const Block& block) {
  const int units = (maximum(p.k.head_dim, p.v.head_dim) + kAppendUnit - 1) / kAppendUnit;
  const std::int64_t work = p.tokens * p.num_kv_heads * units;
  for (std::int64_t i = block.index() * kThreads + block.thread(); i < work; i += block.count() * kThreads) {
    const int unit = static_cast<int>(i % units);
    const int head = static_cast<int>(i / units % p.num_kv_heads);
    const std::int64_t token = i / units / p.num_kv_heads;
    const std::int64_t slot = index_at(p.slots, token);
    if (slot < 0 || slot >= p.num_slots) continue;
    const std::int64_t page = slot / p.page_size;
    const TokenCoord coord{static_cast<int>(page), static_cast<int>(slot - page * p.page_size)};
    FLASHPORT_UNROLL(1)
    for (int side = 0; side < 2; ++side) append_side<kAny>(side == 0 ? p.k : p.v, token, head, unit, coord);
  }
}

}  // namespace flashport::FLASHPORT_TARGET::kv
