// x86 with AVX-512 (F, BW, VL, DQ): 16 lanes, fused multiply-add, half-precision loads.
#pragma once

#include <immintrin.h>

#include "cpu/target/block.h"

namespace flashport::cpu_avx512 {

FLASHPORT_DEVICE Vec fma_rn(Vec a, Vec b, Vec c) {
  return reinterpret_cast<Vec>(
      _mm512_fmadd_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b), reinterpret_cast<__m512>(c)));
}
FLASHPORT_DEVICE float fma_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

FLASHPORT_DEVICE Vec widen_fp16(const std::uint16_t* from) {
  return reinterpret_cast<Vec>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
}

}  // namespace flashport::cpu_avx512

#define FLASHPORT_TILES_HEADER "cpu/target/tiles.h"
