// What the x86 targets with AVX-512 (F, BW, VL, DQ) share: vectors of 16 floats, fused multiply-add, half-precision
// loads.
#pragma once

#include <immintrin.h>

namespace flashport::FLASHPORT_TARGET {
inline constexpr int kVecWidth = 16;
}

#include "cpu/arch/block.h"

namespace flashport::FLASHPORT_TARGET {

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

// Element at[i] of the table for each i.
FLASHPORT_DEVICE Vec look_up(const float (&table)[16], IntVec at) {
  return reinterpret_cast<Vec>(_mm512_permutexvar_ps(reinterpret_cast<__m512i>(at), _mm512_loadu_ps(table)));
}

FLASHPORT_DEVICE Vec larger(Vec a, Vec b) {  // a where one is NaN
  return reinterpret_cast<Vec>(_mm512_max_ps(reinterpret_cast<__m512>(b), reinterpret_cast<__m512>(a)));
}

// 2^x for x of at most 0, within 1e-7: 2^floor(x), exact and 0 for -inf, times a polynomial of the fraction. NaN stays
// NaN.
FLASHPORT_DEVICE Vec exp2_weight(Vec x) {
  constexpr int kFraction = 1;  // x - floor(x)
  const auto bits = reinterpret_cast<__m512>(x);
  const Vec fraction = reinterpret_cast<Vec>(_mm512_reduce_ps(bits, kFraction));
  Vec y = fma_rn(broadcast(1.8671314e-3f), fraction, broadcast(9.017025e-3f));
  y = fma_rn(y, fraction, broadcast(5.579992e-2f));
  y = fma_rn(y, fraction, broadcast(2.4016444e-1f));
  y = fma_rn(y, fraction, broadcast(6.931513e-1f));
  y = fma_rn(y, fraction, broadcast(1.0f));
  return reinterpret_cast<Vec>(_mm512_scalef_ps(reinterpret_cast<__m512>(y), bits));
}

// Keys that decode weighs together, for all columns in turn (kv_products.h): a leaf.
inline constexpr int kValueKeys = 64;

// Accumulators of a product's block, of 32 registers: rows x vectors (float_products.h of attention).
inline constexpr int kProductRows = 6, kProductVecs = 4;

}  // namespace flashport::FLASHPORT_TARGET
