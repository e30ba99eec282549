// Any processor: plain vectors, lowered by the compiler to what the baseline has.
#pragma once

namespace flashport::cpu_generic {
inline constexpr int kVecWidth = 16;
}

#include "cpu/arch/block.h"
#include "cpu/arch/fp32_target.h"

namespace flashport::cpu_generic {

FLASHPORT_DEVICE Vec fma_rn(Vec a, Vec b, Vec c) { return a * b + c; }
FLASHPORT_DEVICE float fma_rn(float a, float b, float c) { return a * b + c; }

FLASHPORT_DEVICE Vec keep_loaded(Vec x) { return x; }  // no register holds 16 floats

FLASHPORT_DEVICE Vec widen_fp16(const std::uint16_t* from) {
  HalfBits half;
  __builtin_memcpy(&half, from, sizeof half);
  const IntVec wide = __builtin_convertvector(half, IntVec);
  const IntVec magnitude = (wide & 0x7fff) << 13;
  // 2^112 moves the exponent's bias, subnormals included; infinities and NaN need the larger exponent put in.
  Vec value = reinterpret_cast<Vec>(magnitude) * 0x1p112f;
  const IntVec special = reinterpret_cast<IntVec>(magnitude >= 0x0f800000);
  value = reinterpret_cast<Vec>((reinterpret_cast<IntVec>(value) & ~special) | ((magnitude | 0x7f800000) & special));
  return reinterpret_cast<Vec>(reinterpret_cast<IntVec>(value) | ((wide & 0x8000) << 16));
}

// Integers of a narrow type as vectors of 32-bit integers.
template <class T>
FLASHPORT_DEVICE IntVec widen(const T* from) {
  T __attribute__((vector_size(kVecWidth * sizeof(T)))) narrow;
  __builtin_memcpy(&narrow, from, sizeof narrow);
  return __builtin_convertvector(narrow, IntVec);
}

// Element at[i] of the table for each i.
FLASHPORT_DEVICE Vec look_up(const float (&table)[16], IntVec at) {
  Vec x;
  for (int i = 0; i < kVecWidth; ++i) x[i] = table[at[i]];
  return x;
}

FLASHPORT_DEVICE Vec larger(Vec a, Vec b) { return a < b ? b : a; }  // a where one is NaN
FLASHPORT_DEVICE Vec exp2_weight(Vec x) { return exp2_approx(x); }   // for x of at most 0

// Keys that decode weighs together, for all columns in turn (kv_products.h): a leaf.
inline constexpr int kValueKeys = 64;

// Accumulators of a product's block: rows x vectors (float_products.h of attention).
inline constexpr int kProductRows = 2, kProductVecs = 1;

// Accumulators of a product's block (delta_tiles.h): rows x vectors, of which each takes four registers of 16.
inline constexpr int kDeltaRows = 2, kDeltaVecs = 1;

}  // namespace flashport::cpu_generic
