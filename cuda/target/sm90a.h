// NVIDIA Hopper (H100, H200), and the mould for mma.sync targets: cp.async stages, ldmatrix, mma.sync.
#pragma once

#include "cuda/target/block.h"

#define FLASHPORT_TILES_HEADER "cuda/target/tiles.h"
#define FLASHPORT_STATE_TILE_HEADER "cuda/target/state_tile.h"
#define FLASHPORT_DELTA_TILES_HEADER "cuda/target/delta_tiles.h"
