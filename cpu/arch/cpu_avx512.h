// x86 with AVX-512 (F, BW, VL, DQ).
#pragma once

#include "cpu/arch/avx512.h"

namespace flashport::cpu_avx512 {

// Accumulators of a product's block (delta_tiles.h): rows x vectors, of 32 registers.
inline constexpr int kDeltaRows = 4, kDeltaVecs = 4;

}  // namespace flashport::cpu_avx512

#define FLASHPORT_DECODE_TUNING_HEADER "cpu/tuning/decode/cpu.h"
#define FLASHPORT_ATTENTION_TUNING_HEADER "cpu/tuning/attention/cpu.h"
#define FLASHPORT_GATED_DELTA_TUNING_HEADER "cpu/tuning/gated_delta/cpu.h"
#define FLASHPORT_ATTENTION_PRODUCTS_HEADER "cpu/attention/float_products.h"
#define FLASHPORT_ATTENTION_TILES_HEADER "cpu/attention/tiles.h"
#define FLASHPORT_DECODE_TILES_HEADER "cpu/decode/tiles.h"
#define FLASHPORT_STATE_TILE_HEADER "cpu/gated_delta/state_tile.h"
#define FLASHPORT_DELTA_TILES_HEADER "cpu/gated_delta/delta_tiles.h"
