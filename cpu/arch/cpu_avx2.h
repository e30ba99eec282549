// x86 with AVX2, FMA and F16C: vectors of 8 floats in 16 registers.
#pragma once

#include <immintrin.h>

namespace flashport::cpu_avx2 {
inline constexpr int kVecWidth = 8;
}

#include "cpu/arch/block.h"
#include "cpu/arch/fp32_target.h"

namespace flashport::cpu_avx2 {

FLASHPORT_DEVICE Vec fma_rn(Vec a, Vec b, Vec c) {
  return reinterpret_cast<Vec>(
      _mm256_fmadd_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b), reinterpret_cast<__m256>(c)));
}
FLASHPORT_DEVICE float fma_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

// x, in a register: GCC would load it again for each of its uses.
FLASHPORT_DEVICE Vec keep_loaded(Vec x) {
  asm("" : "+x"(x));
  return x;
}

FLASHPORT_DEVICE Vec widen_fp16(const std::uint16_t* from) {
  return reinterpret_cast<Vec>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}

// Integers of a narrow type as vectors of 32-bit integers.
FLASHPORT_DEVICE IntVec widen(const std::uint16_t* from) {
  return reinterpret_cast<IntVec>(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}
FLASHPORT_DEVICE IntVec widen(const std::uint8_t* from) {
  return reinterpret_cast<IntVec>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
}
FLASHPORT_DEVICE IntVec widen(const std::int8_t* from) {
  return reinterpret_cast<IntVec>(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
}

// Element at[i] of the table for each i.
FLASHPORT_DEVICE Vec look_up(const float (&table)[16], IntVec at) {
  const auto index = reinterpret_cast<__m256i>(at);  // a permutation takes its low three bits, the blend the sign
  const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), index);
  const __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + kVecWidth), index);
  return reinterpret_cast<Vec>(_mm256_blendv_ps(low, high, reinterpret_cast<__m256>(at << 28)));
}

FLASHPORT_DEVICE Vec larger(Vec a, Vec b) {  // a where one is NaN
  return reinterpret_cast<Vec>(_mm256_max_ps(reinterpret_cast<__m256>(b), reinterpret_cast<__m256>(a)));
}
FLASHPORT_DEVICE Vec exp2_weight(Vec x) { return exp2_approx(x); }  // for x of at most 0

// Keys that decode weighs together, for all columns in turn (kv_products.h); a column's sum is stored in between.
inline constexpr int kValueKeys = 8;

// Accumulators of a product's block: rows x vectors (float_products.h of attention).
inline constexpr int kProductRows = 6, kProductVecs = 2;

// Accumulators of a product's block (delta_tiles.h): rows x vectors.
inline constexpr int kDeltaRows = 4, kDeltaVecs = 2;

}  // namespace flashport::cpu_avx2
