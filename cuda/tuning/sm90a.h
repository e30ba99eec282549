// Schedules of the decode kernels on Hopper (H100, H200), one row a class of shapes: shared memory is 227 KB and the
// register file 64 K a multiprocessor. `stages` counts tiles of 64 keys or values; two tiles a block in flight are too
// few, more than 200 KB a multiprocessor change nothing. Times beside rows: H200, the variants that were measured
// (docs/tuning.md).
#pragma once

#include "common/device/config.h"
#include "common/device/gated_delta_config.h"

namespace flashport::sm90a {

inline constexpr int kMostSharedBytes = 227 * 1024;  // of a block

constexpr DecodeTuning decode_tuning(const DecodeShape& shape) {
  const int wider = shape.head_dim_qk > shape.head_dim_v ? shape.head_dim_qk : shape.head_dim_v;
  const int tile_bytes = 64 * kv_row_bytes(shape.kv, wider);
  // compute waves, tiles, blocks of a multiprocessor, producer waves, teams (1)
  if (shape.head_dim_v >= 512) return {8, tile_bytes > 48 * 1024 ? 3 : 5, 1, 4};
  if (shape.rows == 64) return {8, tile_bytes > 24 * 1024 ? 5 : 6, 1, shape.head_dim_v >= 256 ? 1 : 4};
  // 32 x 4k: 48 us; {4, 6, 1, 2} 51
  if (shape.head_dim_v >= 256) return {shape.rows == 8 ? 4 : 8, tile_bytes > 24 * 1024 ? 6 : 8, 1, 2};
  // 16 x 4k: 40 us; {1, 4, 6, 1} 63, {4, 10, 2, 2} 49. Of more rows a fifth tile is the last for which four blocks fit.
  if (shape.head_dim_qk <= 64) return {2, shape.rows == 8 ? 6 : 5, 4, 1};
  // Half the waves for products that widen: 64 x 8k, fp8 274 us, {4, 6, 2, 2} 283, {1, 4, 4, 1} 300, {2, 5, 1, 1, 4}
  // 291.
  if (shape.kv == KvFormat::kFp8E4M3 && shape.rows == 8) return {2, 5, 4, 1};
  // 64 x 8k, on a card that takes 494 us for bf16: 316 us, three tiles 322. Four separate blocks, {2, 3, 4, 1}, took
  // 390 where copies of 8 bytes by teams took 330.
  if (shape.kv == KvFormat::kQ8_0 && shape.rows == 8) return {2, 4, 1, 1, 4};
  return {4, tile_bytes > 16 * 1024 ? 4 : 6, 2, 2};  // 64 x 8k: 488 us; {4, 6, 2, 1} 600, {4, 4, 3, 2} 648 (spills)
}

// States that an update fetches while the kernel before it ends: 8 x 4 KB a multiprocessor. 64 sequences 66.2 us
// for 67.0; twice as many are no faster.
inline constexpr int kPrefetchedBytes = 132 * 8 * 4096;

// States [V, K]: a warp a block, with 8 loads of 16 bytes a lane. States [K, V]: a line of V, and 32 keys a warp. Gates
// of keys, and long keys, take registers of their own. One token of 256 sequences, 32 heads of [128, 128], in us; a
// copy in place takes 260 (fp32) and 131 (bf16):
//   [V, K] fp32 265, 16 columns 272, 4 columns 318; bf16 145, 8 columns 163. With gates of keys 270 and 194
//   [K, V] fp32 270, 32 columns 291; bf16 162, 32 columns 174. With gates of keys 292 and 163, of 12 warps 188
constexpr GatedDeltaTuning gated_delta_tuning(const GatedDeltaShape& shape) {
  const bool fp32 = !is_packed(shape);
  const bool gates = shape.gate != GateForm::kHead;
  const bool long_keys = shape.head_dim_k > 128;
  if (shape.key_major != 0) {
    const bool narrow = fp32 && (gates || long_keys);
    const int warps = narrow ? (long_keys ? 16 : 24) : (gates && long_keys ? 12 : 16);  // of a multiprocessor
    return {narrow ? 32 : 64, shape.head_dim_k / 32, warps * 32 / shape.head_dim_k};
  }
  if (shape.gate == GateForm::kAny) return {1024 / shape.head_dim_k, 1, long_keys ? 16 : 20};  // more would spill
  if (fp32) return {1024 / shape.head_dim_k, 1, gates ? (long_keys ? 16 : 24) : (long_keys ? 28 : 32)};
  return {2048 / shape.head_dim_k, 1, gates && shape.head_dim_k > 64 ? 12 : 16};
}

}  // namespace flashport::sm90a
