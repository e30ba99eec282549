// Schedules of the decode kernels on Hopper (H100, H200), one row a class of shapes: shared memory is 227 KB and the
// register file 64 K a multiprocessor. `stages` counts tiles of 64 keys or values; two tiles a block in flight are too
// few, more than 200 KB a multiprocessor change nothing. Times in comments: H200, the variants that were measured
// (docs/tuning.md).
#pragma once

#include "common/device/decode/config.h"

namespace flashport::sm90a {

// Keys and values that L2 (50 MB) keeps from one launch to the next; more than these are read once.
inline constexpr std::int64_t kCachedBytes = 40 << 20;

constexpr DecodeTuning decode_tuning(const DecodeShape& shape) {
  const int wider = shape.head_dim_qk > shape.head_dim_v ? shape.head_dim_qk : shape.head_dim_v;
  const int tile_bytes = 64 * kv_row_bytes(shape.k_format, wider);
  const bool wide_type = shape.k_format == KvFormat::kBf16 || shape.k_format == KvFormat::kFp16;
  if (wide_type && shape.rows <= 16 && wider <= 256 && (wider < 256 || shape.rows == 8)) {
    // Waves that copy for themselves: compute waves, stages of a turn, blocks of a multiprocessor, no producers, one team,
    // leaves of a turn.
    const bool few_rows = shape.rows == 8;
    if (wider <= 64) return few_rows ? DecodeTuning{4, 3, 2, 0, 1, 2} : DecodeTuning{4, 5, 2, 0, 1, 1};
    if (wider <= 128) return few_rows ? DecodeTuning{4, 3, 1, 0, 1, 2} : DecodeTuning{4, 5, 1, 0, 1, 1};
    return {4, shape.head_dim_v <= 128 ? 4 : 3, 1, 0, 1, 1};
  }
  // compute waves, tiles, blocks of a multiprocessor, producer waves, teams (1)
  if (shape.head_dim_v >= 512) return {8, tile_bytes > 48 * 1024 ? 3 : 5, 1, 4};
  if (shape.rows == 64) return {8, tile_bytes > 24 * 1024 ? 5 : 6, 1, shape.head_dim_v >= 256 ? 1 : 4};
  // 32 x 4k: 48 us; {4, 6, 1, 2} 51
  if (shape.head_dim_v >= 256) return {shape.rows == 8 ? 4 : 8, tile_bytes > 24 * 1024 ? 6 : 8, 1, 2};
  // 16 x 4k: 40 us; {1, 4, 6, 1} 63, {4, 10, 2, 2} 49. With more rows, four blocks fit up to a fifth tile.
  if (shape.head_dim_qk <= 64) return {2, shape.rows == 8 ? 6 : 5, 4, 1};
  // Half the waves for products that widen: 64 x 8k, fp8 274 us, {4, 6, 2, 2} 283, {1, 4, 4, 1} 300, {2, 5, 1, 1, 4}
  // 291.
  if (shape.k_format == KvFormat::kFp8E4M3 && shape.rows == 8) return {2, 5, 4, 1};
  // 64 x 8k, on a card that takes 494 us for bf16: 316 us, three tiles 322. Four separate blocks, {2, 3, 4, 1}, took
  // 390 where copies of 8 bytes by teams took 330.
  if (shape.k_format == KvFormat::kQ8_0 && shape.rows == 8) return {2, 4, 1, 1, 4};
  return {4, tile_bytes > 16 * 1024 ? 4 : 6, 2, 2};  // 64 x 8k: 488 us; {4, 6, 2, 1} 600, {4, 4, 3, 2} 648 (spills)
}

}  // namespace flashport::sm90a
