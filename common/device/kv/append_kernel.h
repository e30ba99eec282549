// Writes new tokens into a cache, in the cache's element type: stored = value / scale. A thread takes one unit of a
// row: 32 values, which in q8_0 are a block (scale max|x| / 127 in fp16, then 32 int8, as ggml has it). If a value of a
// block is NaN or infinite, its scale becomes NaN and its bytes 0, so that the whole block reads as NaN on every
// target.
#pragma once

#include "common/device/core/scalar_access.h"
#include "common/device/core/strided_offset.h"
#include "common/device/kv/paged_kv.h"

namespace flashport::FLASHPORT_TARGET::kv {

inline constexpr int kAppendUnit = kv_format_trait(KvFormat::kQ8_0).block_values;
inline constexpr int kQ8BlockBytes = kv_format_trait(KvFormat::kQ8_0).block_bytes;
inline constexpr int kQ8ScaleBytes = kv_format_trait(KvFormat::kQ8_0).scale_bytes;

FLASHPORT_DEVICE void store_q8_0_block(char* to, const float* x) {
  constexpr int kInfinityBits = 0x7f800000;
  constexpr std::uint16_t kNan = 0x7e00;  // conversions of NaN differ between processors
  // The bits of magnitudes have the order of the magnitudes, and NaN is above infinity. A maximum of floats would treat
  // NaN as each processor does.
  int most_bits = 0;
  for (int i = 0; i < kAppendUnit; ++i) most_bits = maximum(most_bits, __builtin_bit_cast(int, x[i]) & 0x7fffffff);
  const bool finite = most_bits < kInfinityBits;
  const float d = __builtin_bit_cast(float, most_bits) / 127.0f;
  const float inverse = d == 0.0f ? 0.0f : 1.0f / d;
  *reinterpret_cast<std::uint16_t*>(to) = finite ? __builtin_bit_cast(std::uint16_t, to_half(d)) : kNan;
  for (int i = 0; i < kAppendUnit; ++i) {
    const float value = finite ? x[i] * inverse : 0.0f;
    reinterpret_cast<signed char*>(to)[kQ8ScaleBytes + i] = static_cast<signed char>(round_to_int(value));
  }
}

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

// Writes the `count` values of unit `unit` of the row that begins at `row`.
FLASHPORT_DEVICE void store_unit(KvFormat format, char* row, int unit, const float* x, int count) {
  if (format == KvFormat::kQ8_0) {
    store_q8_0_block(row + unit * kQ8BlockBytes, x);
    return;
  }
  for (int i = 0; i < count; ++i) store_value(format, row, unit * kAppendUnit + i, x[i]);
}

FLASHPORT_DEVICE void append_side(const AppendParams& p, const AppendSide& side, std::int64_t token, int head, int unit,
                                  TokenCoord coord) {
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
  store_unit(p.kv, static_cast<char*>(side.cache.data) + row_offset(side.cache, coord, head), unit, x, count);
}

// A thread writes the K and V of one unit, head and token; units are counted fastest, then heads, then tokens.
template <int kThreads>
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
    append_side(p, p.k, token, head, unit, coord);
    append_side(p, p.v, token, head, unit, coord);
  }
}

}  // namespace flashport::FLASHPORT_TARGET::kv
