// x86 with AVX-512 (F, BW, VL, DQ): vectors of 16 floats, fused multiply-add, half-precision loads.
#pragma once

#include <immintrin.h>

#include "cpu/arch/block.h"

namespace flashport::cpu_avx512 {

FLASHPORT_DEVICE Vec fma_rn(Vec a, Vec b, Vec c) {
  return reinterpret_cast<Vec>(
      _mm512_fmadd_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b), reinterpret_cast<__m512>(c)));
}
FLASHPORT_DEVICE float fma_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

// x, in a register: GCC would load it again for each of its uses.
FLASHPORT_DEVICE Vec keep_loaded(Vec x) {
  asm("" : "+v"(x));
  return x;
}

FLASHPORT_DEVICE Vec widen_fp16(const std::uint16_t* from) {
  return reinterpret_cast<Vec>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
}

// Integers of a narrow type as vectors of 32-bit integers.
FLASHPORT_DEVICE IntVec widen(const std::uint16_t* from) {
  return reinterpret_cast<IntVec>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
}
FLASHPORT_DEVICE IntVec widen(const std::uint8_t* from) {
  return reinterpret_cast<IntVec>(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}
FLASHPORT_DEVICE IntVec widen(const std::int8_t* from) {
  return reinterpret_cast<IntVec>(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}

// Accumulators of a product's block (cpu/attention/products.h): rows x vectors
inline constexpr int kProductRows = 6, kProductVecs = 4;

// Accumulators of a product's block (delta_tiles.h): rows x vectors, of 32 registers.
inline constexpr int kDeltaRows = 4, kDeltaVecs = 4;

}  // namespace flashport::cpu_avx512

#define FLASHPORT_DECODE_TUNING_HEADER "cpu/tuning/decode/cpu.h"
#define FLASHPORT_ATTENTION_TUNING_HEADER "cpu/tuning/attention/cpu.h"
#define FLASHPORT_GATED_DELTA_TUNING_HEADER "cpu/tuning/gated_delta/cpu.h"
#define FLASHPORT_ATTENTION_TILES_HEADER "cpu/attention/tiles.h"
#define FLASHPORT_DECODE_TILES_HEADER "cpu/decode/tiles.h"
#define FLASHPORT_STATE_TILE_HEADER "cpu/gated_delta/state_tile.h"
#define FLASHPORT_DELTA_TILES_HEADER "cpu/gated_delta/delta_tiles.h"
