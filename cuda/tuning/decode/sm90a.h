// Schedules of the decode kernels on Hopper (H100, H200), one row a class of shapes: shared memory is 227 KB and the
// register file 64 K a multiprocessor. `stages` counts tiles of the keys or of the values of a turn, or of half of them
// (turn_tiles() in cuda/decode/block_shape.h); two tiles a block in flight are too few, more than 200 KB a
// multiprocessor change nothing. Times in comments: H200, the variants that were measured (docs/tuning.md).
#pragma once

#include "common/device/decode/config.h"

namespace flashport::sm90a {

// Keys and values that L2 (50 MB) keeps from one launch to the next; more than these are read once. Beside as many
// bytes of blocks it does not keep the kernel: 8 x 4k of q4_0, 37.7 MB, took 42.0 us and takes 37.1 when they are read
// once.
constexpr std::int64_t cached_bytes(KvFormat format) {
  return kv_format_trait(format).block_values > 1 ? 32 << 20 : 40 << 20;
}

constexpr DecodeTuning decode_tuning(const DecodeShape& shape) {
  const int wider = shape.head_dim_qk > shape.head_dim_v ? shape.head_dim_qk : shape.head_dim_v;
  const int tile_bytes = 64 * kv_row_bytes(shape.k_format, wider);
  // compute waves, tiles, blocks of a multiprocessor, producer waves, teams (1), leaves of a turn (1)
  if (reads_segments(shape)) {
    if (wider > 128) return {8, wider > 256 ? 2 : 4, 1, 8};
    return {4, shape.rows == 8 ? 4 : 2, 1, 12, 1, 2};
  }
  if (shape.head_dim_v >= 512) return {8, tile_bytes > 48 * 1024 ? 3 : 5, 1, 4};
  // One warpgroup computes and one copies; two compute where O is wide or rows are many (wgmma_tiles.h). Two blocks
  // overlap one's products with the other's exponentials, as two warpgroups of a block do.
  if (shape.rows == 128) return wider <= 64 ? DecodeTuning{8, 10, 1, 4, 1, 2} : DecodeTuning{8, 5, 1, 4, 1, 2};
  if (shape.rows == 64) {
    if (wider <= 64) return {4, 5, 2, 4, 1, 2};
    if (wider <= 128) return {4, 5, 2, 4};
    return wider <= 192 ? DecodeTuning{4, 8, 1, 4} : DecodeTuning{8, 4, 1, 4};
  }
  if (wider > 192) return {shape.rows == 8 ? 4 : 8, 6, 1, 2};
  if (wider > 128) return {4, 8, 1, 2};
  const bool in_blocks =
      kv_format_trait(shape.k_format).block_values > 1 || kv_format_trait(shape.v_format).block_values > 1;
  const bool wide_type = !in_blocks && (shape.k_format == KvFormat::kBf16 || shape.k_format == KvFormat::kFp16);
  const int tiles = shape.rows == 8 ? 6 : 5;  // of two blocks, with what 16 rows take beside them
  // Two teams of a block copy the rows of two heads at once, as these have 128 bytes: 64 x 8k takes 253 us for 266.
  if (shape.large_cache && wide_type) return {4, tiles, 1, 2, 2, 2};
  if (wide_type) return wider <= 64 ? DecodeTuning{4, tiles, 2, 2, 1, 2} : DecodeTuning{4, 6, 1, 4, 1, 2};
  if (wider <= 64) return {2, 5, 4, 1};
  if (reads_factors(shape)) {
    const bool narrow = shape.k_format == KvFormat::kInt4;
    return shape.large_cache ? DecodeTuning{2, narrow ? 6 : 4, 1, 1, 4, 2}
                             : DecodeTuning{4, narrow ? 6 : 4, 1, 2, 2, 2};
  }
  if (in_blocks) {
    if (shape.rows > 8) {
      // What fits.
      if (shape.large_cache) return {2, has_format(shape, KvFormat::kQ8_0) ? 4 : 3, 1, 1, 4, 2};
      return {4, 4, 2, 2, 1, 2};
    }
    // A place of the ring has keys or has values for good where their rows differ: so rings have whole turns.
    const bool mixed = shape.k_format != shape.v_format || chooses_formats(shape);
    if (!shape.large_cache) return {4, mixed ? 4 : 5, 1, 2, 2, 2};
    // Where rows of 16 bits lie in places of q4_0, fewer places fit.
    if (shape.has_wide_segments && shape.k_format == KvFormat::kQ4_0) return {2, 3, 1, 1, 4, 2};
    // Half as many waves for each head, which halves what each costs beside the products: 64 x 8k of q8_0 takes 292 us
    // for 392. They take longer for a leaf, and small calls lose: 1 x 8k 35 for 15.
    return {2, shape.k_format == KvFormat::kQ8_0 && !mixed ? 5 : 4, 1, 1, 4, 2};
  }
  return {4, tiles, 2, 2, 1, 2};
}

}  // namespace flashport::sm90a
