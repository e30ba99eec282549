// x86 with AVX-512 (F, BW, VL, DQ).
#pragma once

#include "cpu/arch/avx512.h"
#include "cpu/arch/fp32_target.h"

namespace flashport::cpu_avx512 {

// Accumulators of a product's block (delta_tiles.h): rows x vectors, of 32 registers.
inline constexpr int kDeltaRows = 4, kDeltaVecs = 4;

}  // namespace flashport::cpu_avx512
