// AMD CDNA4 (MI350X, MI355X): as CDNA3, but fp8 is OCP's, LDS is larger, and bf16 has a conversion of its own.
#pragma once

#include "hip/tuning/gfx950.h"

#include "hip/arch/block.h"

#define FLASHPORT_WORDS_HEADER "hip/arch/fp8.h"
#define FLASHPORT_STATE_TILE_HEADER "hip/gated_delta/state_tile.h"
#define FLASHPORT_ATTENTION_COPIES_HEADER "hip/attention/direct_copies.h"
#define FLASHPORT_ATTENTION_TILES_HEADER "hip/attention/mfma_tiles.h"
#define FLASHPORT_DECODE_TILES_HEADER "hip/decode/mfma_tiles.h"
#define FLASHPORT_DELTA_TILES_HEADER "hip/gated_delta/mfma_delta_tiles.h"

namespace flashport::gfx950 {

inline constexpr Fp8Form kConvertedFp8 = Fp8Form::kOcp;  // what its conversion instructions read
inline constexpr bool kConvertsToBf16 = true;            // v_cvt_pk_bf16_f32
inline constexpr bool kHasWideMfma = true;               // 32x32x16
inline constexpr bool kHasPermlaneSwap = true;
inline constexpr int kSharedBytes = 160 * 1024;  // LDS of a CU

FLASHPORT_DEVICE void await_stores() { asm volatile("s_waitcnt vmcnt(0)" ::: "memory"); }

}  // namespace flashport::gfx950
