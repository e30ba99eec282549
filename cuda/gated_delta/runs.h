// Loads and stores of runs: contiguous elements of one lane, in vectors of up to 16 bytes where they are aligned.
#pragma once

#include "common/device/core/scalar_access.h"

namespace flashport::FLASHPORT_TARGET::gated_delta {

template <int kBytes>
struct WordsOf;
template <>
struct WordsOf<16> {
  using Type = uint4;
};
template <>
struct WordsOf<8> {
  using Type = uint2;
};
template <>
struct WordsOf<4> {
  using Type = unsigned;
};

// Elements that are one access where they are aligned; zeros where they do not exist.
template <class T, int kCount>
struct Vector {
  T x[kCount];
};
template <int kCount, bool kAligned, class T>
FLASHPORT_DEVICE Vector<T, kCount> read_vector(const T* from, bool live) {
  using Words = typename WordsOf<kCount * sizeof(T)>::Type;
  Vector<T, kCount> vector = {};
  if constexpr (kAligned) {
    Words words = {};
    if (live) words = *reinterpret_cast<const Words*>(from);
    __builtin_memcpy(&vector, &words, sizeof vector);
  } else if (live) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) vector.x[i] = from[i];
  }
  return vector;
}
template <int kCount, bool kAligned, class T>
FLASHPORT_DEVICE void write_vector(T* to, const Vector<T, kCount>& vector) {
  using Words = typename WordsOf<kCount * sizeof(T)>::Type;
  if constexpr (kAligned) {
    Words words;
    __builtin_memcpy(&words, &vector, sizeof vector);
    *reinterpret_cast<Words*>(to) = words;
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) to[i] = vector.x[i];
  }
}

template <class T, int kCount>
constexpr int kVectorOf = kCount * static_cast<int>(sizeof(T)) < 16 ? kCount : 16 / static_cast<int>(sizeof(T));

// A run of kCount elements, of which the first `live` exist, a number of whole vectors.
template <int kCount, bool kAligned, class T>
FLASHPORT_DEVICE void load_run(float* x, const T* from, int live) {
  constexpr int kVector = kVectorOf<T, kCount>;
#pragma unroll
  for (int i = 0; i < kCount; i += kVector) {
    const Vector<T, kVector> vector = read_vector<kVector, kAligned>(from + i, i < live);
#pragma unroll
    for (int j = 0; j < kVector; ++j) x[i + j] = to_float(vector.x[j]);
  }
}
template <int kCount, bool kAligned, class T>
FLASHPORT_DEVICE void store_run(T* to, const float* x, int live) {
  constexpr int kVector = kVectorOf<T, kCount>;
#pragma unroll
  for (int i = 0; i < kCount; i += kVector) {
    Vector<T, kVector> vector;
#pragma unroll
    for (int j = 0; j < kVector; ++j) store_as(&vector.x[j], x[i + j]);
    if (i < live) write_vector<kVector, kAligned>(to + i, vector);
  }
}

// Stores a number that L2 evicts last, after the data that streams through it. So the sector is still in L2 when other
// blocks write its other elements, and when the next kernel reads it; memory takes longer to write part of a sector
// than all of it.
template <class T>
FLASHPORT_DEVICE void store_kept(T* to, float value) {
  std::uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  T element;
  store_as(&element, value);
  if constexpr (sizeof(T) == 2) {
    std::uint16_t bits;
    __builtin_memcpy(&bits, &element, sizeof bits);
    asm volatile("st.global.L2::cache_hint.b16 [%0], %1, %2;" ::"l"(to), "h"(bits), "l"(policy) : "memory");
  } else {
    std::uint32_t bits;
    __builtin_memcpy(&bits, &element, sizeof bits);
    asm volatile("st.global.L2::cache_hint.b32 [%0], %1, %2;" ::"l"(to), "r"(bits), "l"(policy) : "memory");
  }
}

}  // namespace flashport::FLASHPORT_TARGET::gated_delta
