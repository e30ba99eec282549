// AMD RDNA3, one generic code object for all its processors (gfx1100 to gfx1103, gfx1150 to gfx1153): wave32, WMMA.
#pragma once

#include "hip/tuning/gfx11.h"

#include "hip/arch/block.h"

#define FLASHPORT_WORDS_HEADER "hip/arch/fp8.h"
#define FLASHPORT_STATE_TILE_HEADER "hip/gated_delta/state_tile.h"
#define FLASHPORT_ATTENTION_COPIES_HEADER "hip/attention/transposing_copies.h"
#define FLASHPORT_ATTENTION_TILES_HEADER "hip/attention/wmma_tiles.h"
#define FLASHPORT_DECODE_TILES_HEADER "hip/decode/wmma_tiles.h"
#define FLASHPORT_DELTA_TILES_HEADER "hip/gated_delta/wmma_delta_tiles.h"

namespace flashport::gfx11 {

inline constexpr Fp8Form kConvertedFp8 = Fp8Form::kNone;  // it has no conversion instructions of fp8

FLASHPORT_DEVICE void await_stores() { asm volatile("s_waitcnt_vscnt null, 0x0" ::: "memory"); }

}  // namespace flashport::gfx11
