// AMD CDNA3 (MI300A, MI300X, MI325X): waves of 64 lanes, MFMA, 512 registers a lane.
#pragma once

#include "hip/tuning/gfx942.h"

#include "hip/arch/block.h"

#define FLASHPORT_WORDS_HEADER "hip/arch/fp8.h"
#define FLASHPORT_STATE_TILE_HEADER "hip/gated_delta/state_tile.h"
#define FLASHPORT_ATTENTION_COPIES_HEADER "hip/attention/transposing_copies.h"
#define FLASHPORT_ATTENTION_TILES_HEADER "hip/attention/mfma_tiles.h"
#define FLASHPORT_DECODE_TILES_HEADER "hip/decode/mfma_tiles.h"
#define FLASHPORT_DELTA_TILES_HEADER "hip/gated_delta/mfma_delta_tiles.h"

namespace flashport::gfx942 {

inline constexpr Fp8Form kConvertedFp8 = Fp8Form::kFnuz;  // what its conversion instructions read
inline constexpr bool kConvertsToBf16 = false;
inline constexpr bool kHasWideMfma = false;  // 32x32x16
inline constexpr bool kHasPermlaneSwap = false;
inline constexpr int kSharedBytes = 64 * 1024;  // LDS of a CU

FLASHPORT_DEVICE void await_stores() { asm volatile("s_waitcnt vmcnt(0)" ::: "memory"); }

}  // namespace flashport::gfx942
