// AMD RDNA3, one generic code object for all its processors (gfx1100 to gfx1103, gfx1150 to gfx1153): wave32, WMMA.
#pragma once

#include "hip/tuning/gfx11.h"

#include "hip/target/block.h"

#define FLASHPORT_STATE_TILE_HEADER "hip/target/state_tile.h"
#define FLASHPORT_TILES_HEADER "hip/target/wmma_tiles.h"
#define FLASHPORT_DELTA_TILES_HEADER "hip/target/wmma_delta_tiles.h"

namespace flashport::gfx11 {

FLASHPORT_DEVICE void await_stores() { asm volatile("s_waitcnt_vscnt null, 0x0" ::: "memory"); }

}  // namespace flashport::gfx11
