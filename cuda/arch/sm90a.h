// NVIDIA Hopper (H100, H200), and the mould for mma.sync targets: cp.async stages, ldmatrix, mma.sync; wgmma for tiles
// of 64 and 128 rows.
#pragma once

#include "cuda/arch/block.h"

#define FLASHPORT_WORDS_HEADER "cuda/arch/words.h"
#define FLASHPORT_DECODE_TUNING_HEADER "cuda/tuning/decode/sm90a.h"
#define FLASHPORT_GATED_DELTA_TUNING_HEADER "cuda/tuning/gated_delta/sm90a.h"
#define FLASHPORT_ATTENTION_TUNING_HEADER "cuda/tuning/attention/sm90a.h"
#define FLASHPORT_DECODE_TILES_HEADER "cuda/decode/wgmma_tiles.h"
#define FLASHPORT_STATE_TILE_HEADER "cuda/gated_delta/state_tile.h"
#define FLASHPORT_DELTA_TILES_HEADER "cuda/gated_delta/delta_tiles.h"

namespace flashport::sm90a {

inline constexpr int kMostSharedBytes = 227 * 1024;  // of a block

}  // namespace flashport::sm90a
