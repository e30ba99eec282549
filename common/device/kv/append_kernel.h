// Writes new tokens into a cache, in the format of each side: stored = value / scale. A thread takes one unit of a row:
// 32 values, which are a block in the formats that have blocks (blocks.h). There are two kernels: append_blocks writes
// every format, append_kv those that take few registers, which are elements and q8_0.
#pragma once

#include "common/device/core/scalar_access.h"
#include "common/device/core/strided_offset.h"
#include "common/device/kv/blocks.h"
#include "common/device/kv/paged_kv.h"

namespace flashport::FLASHPORT_TARGET::kv {

inline constexpr int kAppendUnit = kBlockValues;

// Element `at` of the row that begins at `row`, of a format whose elements are values.
FLASHPORT_DEVICE void store_value(KvFormat format, char* row, int at, float x) {
  switch (format) {
    case KvFormat::kFp32: reinterpret_cast<float*>(row)[at] = x; break;
    case KvFormat::kFp16: reinterpret_cast<Half*>(row)[at] = to_half(x); break;
    case KvFormat::kBf16: reinterpret_cast<BFloat16*>(row)[at] = to_bfloat16(x); break;
    case KvFormat::kFp8E4M3Fnuz: reinterpret_cast<std::uint8_t*>(row)[at] = to_fp8_e4m3fnuz(x); break;
    default: reinterpret_cast<std::uint8_t*>(row)[at] = to_fp8_e4m3(x); break;
  }
}

// Writes the `count` values of the unit that begins at `to`.
template <bool kBlocks>
FLASHPORT_DEVICE void store_unit(KvFormat format, char* to, const float* x, int count) {
  if (kBlocks && is_block_format(format)) return store_block(format, to, x);
  if (!kBlocks && format == KvFormat::kQ8_0) return store_q8_0_block(to, x);
  for (int i = 0; i < count; ++i) store_value(format, to, i, x[i]);
}

template <bool kBlocks>
FLASHPORT_DEVICE void append_side(const AppendSide& side, std::int64_t token, int head, int unit, TokenCoord coord) {
  const int first = unit * kAppendUnit;
  const int count = minimum(kAppendUnit, side.head_dim - first);
  if (count <= 0) return;
  const float scale = head_scale(side.scale, side.scale_stride, head);
  const std::int64_t stride = side.rows.stride_dim;
  const std::int64_t from = strided_offset(side.rows, 0, token, head) + first * stride;
  float x[kAppendUnit];
  for (int i = 0; i < kAppendUnit; ++i) {
    x[i] = i < count ? load_as_float(side.rows.data, side.rows.dtype, from + i * stride) / scale : 0.0f;
  }
  char* row = static_cast<char*>(side.cache.data) + row_offset(side.cache, coord, head);
  store_unit<kBlocks>(side.format, row + unit * side.unit_bytes, x, count);
}

// A thread writes the K and V of one unit, head and token; units are counted fastest, then heads, then tokens.
template <int kThreads, bool kBlocks>
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
    for (int side = 0; side < 2; ++side) append_side<kBlocks>(side == 0 ? p.k : p.v, token, head, unit, coord);
  }
}

}  // namespace flashport::FLASHPORT_TARGET::kv
