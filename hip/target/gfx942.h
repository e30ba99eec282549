// AMD CDNA3 (MI300A, MI300X, MI325X): waves of 64 lanes, MFMA, 512 registers a lane.
#pragma once

#include "hip/tuning/gfx942.h"

#include "hip/target/block.h"

#define FLASHPORT_STATE_TILE_HEADER "hip/target/state_tile.h"
#define FLASHPORT_TILES_HEADER "hip/target/mfma_tiles.h"
#define FLASHPORT_DELTA_TILES_HEADER "hip/target/mfma_delta_tiles.h"

namespace flashport::gfx942 {

inline constexpr KvFormat kNativeFp8 = KvFormat::kFp8E4M3Fnuz;  // what the conversion instructions read
inline constexpr bool kConvertsToBf16 = false;
inline constexpr int kSharedBytes = 64 * 1024;  // LDS of a CU

FLASHPORT_DEVICE void await_stores() { asm volatile("s_waitcnt vmcnt(0)" ::: "memory"); }

}  // namespace flashport::gfx942
