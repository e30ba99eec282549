// How the threads of a block share a query tile: what follows from the shape and the schedule of a kernel alone.
#pragma once

#include "common/device/decode/config.h"
#include "cuda/decode/row_layout.h"

namespace flashport::FLASHPORT_TARGET::decode {

// Whether keys, values or both are in blocks.
constexpr bool has_blocks(const DecodeShape& shape) {
  return is_block_cache(shape.k_format) || is_block_cache(shape.v_format);
}
// What products with keys or with values are computed in: where one is of 16 bits and the other of blocks, shape.math
// is the former's.
constexpr MathType side_math(const DecodeShape& shape, KvFormat side) {
  return is_block_cache(side) ? MathType::kFp16 : shape.math;
}

constexpr int turn_keys(const DecodeConfig& cfg) { return cfg.tuning.leaves * kLeafKeys; }
// Tiles of the ring that the keys of a turn take, and its values. Where four teams share each tile and rows may be
// of q8_0 or have factors, few fit, and the slowest team holds them up: each leaf is given back by itself.
constexpr int turn_tiles(const DecodeConfig& cfg) {
  const bool few_fit = has_format(cfg.shape, KvFormat::kQ8_0) || reads_factors(cfg.shape);
  return cfg.tuning.teams == 4 && few_fit ? cfg.tuning.leaves : 1;
}
constexpr int tile_keys(const DecodeConfig& cfg) { return turn_keys(cfg) / turn_tiles(cfg); }

// Keys of 16 bits of a tile, where segments have them beside those of blocks.
constexpr int wide_tile_keys(const DecodeConfig& cfg) { return tile_keys(cfg) / kLeafKeys * kWideLeafKeys; }

constexpr int compute_threads(const DecodeConfig& cfg) { return cfg.tuning.waves * kWaveSize; }
constexpr int producer_threads(const DecodeConfig& cfg) { return cfg.tuning.producer_waves * kWaveSize; }
constexpr int block_threads(const DecodeConfig& cfg) {
  return cfg.tuning.teams * (compute_threads(cfg) + producer_threads(cfg));
}

// Waves side by side over keys and DV. A wave takes 16 keys at least.
constexpr int column_waves(const DecodeConfig& cfg) {
  const int most = turn_keys(cfg) / 16;
  return cfg.tuning.waves < most ? cfg.tuning.waves : most;
}
// The keys of a turn are so many parts (tiles.h): 32 keys each, or those of a wave where these are fewer.
constexpr int turn_parts(const DecodeConfig& cfg) {
  const int parts = turn_keys(cfg) / 32;
  return column_waves(cfg) > parts ? column_waves(cfg) : parts;
}
constexpr int row_waves(const DecodeConfig& cfg) { return cfg.tuning.waves / column_waves(cfg); }
constexpr int wave_rows(const DecodeConfig& cfg) { return cfg.shape.rows / row_waves(cfg); }

// The compute warpgroups of a tile for wgmma: in all, over the rows (64 each), and over the columns of O.
constexpr int warpgroups(const DecodeConfig& cfg) { return cfg.tuning.waves / 4; }
constexpr int row_warpgroups(const DecodeConfig& cfg) { return cfg.shape.rows / 64; }
constexpr int column_warpgroups(const DecodeConfig& cfg) { return warpgroups(cfg) / row_warpgroups(cfg); }

// Each wave publishes its columns of its rows, a warpgroup all together.
constexpr DecodeSplit decode_split(const DecodeConfig& cfg) {
  if (uses_wgmma(cfg.shape)) {
    return {.turn_leaves = cfg.tuning.leaves,
            .row_slices = row_warpgroups(cfg),
            .column_slices = column_warpgroups(cfg),
            .large = true};
  }
  const int blocks = cfg.tuning.blocks_per_multiprocessor * cfg.tuning.teams;
  const bool finer = cfg.shape.rows == 8 && cfg.tuning.leaves == 2 && blocks == 2 && !has_blocks(cfg.shape) &&
                     !reads_factors(cfg.shape);
  return {.turn_leaves = cfg.tuning.leaves,
          .row_slices = row_waves(cfg),
          .column_slices = column_waves(cfg),
          .finer = finer || cfg.shape.has_wide_segments,
          .wide = cfg.shape.head_dim_v >= 256,
          .powers = cfg.shape.has_wide_segments};  // chunks of six leaves end too often: 64 x 8k takes 3% longer
}

}  // namespace flashport::FLASHPORT_TARGET::decode
