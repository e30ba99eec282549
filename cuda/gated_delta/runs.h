// Runs of neighbouring elements between memory and a lane, in accesses of up to 16 bytes where they are aligned.
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

// Neighbours that are one access where they are aligned; zeros where they do not exist.
template <class T, int kCount>
struct Piece {
  T x[kCount];
};
template <int kCount, bool kAligned, class T>
FLASHPORT_DEVICE Piece<T, kCount> load_piece(const T* from, bool live) {
  using Words = typename WordsOf<kCount * sizeof(T)>::Type;
  Piece<T, kCount> piece = {};
  if constexpr (kAligned) {
    Words words = {};
    if (live) words = *reinterpret_cast<const Words*>(from);
    __builtin_memcpy(&piece, &words, sizeof piece);
  } else if (live) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) piece.x[i] = from[i];
  }
  return piece;
}
template <int kCount, bool kAligned, class T>
FLASHPORT_DEVICE void store_piece(T* to, const Piece<T, kCount>& piece) {
  using Words = typename WordsOf<kCount * sizeof(T)>::Type;
  if constexpr (kAligned) {
    Words words;
    __builtin_memcpy(&words, &piece, sizeof piece);
    *reinterpret_cast<Words*>(to) = words;
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) to[i] = piece.x[i];
  }
}

template <class T, int kCount>
constexpr int kPieceOf = kCount * static_cast<int>(sizeof(T)) < 16 ? kCount : 16 / static_cast<int>(sizeof(T));

// A run of kCount neighbours, of which the first `live` (of whole pieces) exist.
template <int kCount, bool kAligned, class T>
FLASHPORT_DEVICE void load_run(float* x, const T* from, int live) {
  constexpr int kPiece = kPieceOf<T, kCount>;
#pragma unroll
  for (int i = 0; i < kCount; i += kPiece) {
    const Piece<T, kPiece> piece = load_piece<kPiece, kAligned>(from + i, i < live);
#pragma unroll
    for (int j = 0; j < kPiece; ++j) x[i + j] = to_float(piece.x[j]);
  }
}
template <int kCount, bool kAligned, class T>
FLASHPORT_DEVICE void store_run(T* to, const float* x, int live) {
  constexpr int kPiece = kPieceOf<T, kCount>;
#pragma unroll
  for (int i = 0; i < kCount; i += kPiece) {
    Piece<T, kPiece> piece;
#pragma unroll
    for (int j = 0; j < kPiece; ++j) store_as(&piece.x[j], x[i + j]);
    if (i < live) store_piece<kPiece, kAligned>(to + i, piece);
  }
}

// One number that L2 keeps while what streams through it leaves: neighbours in its sector that other blocks write a
// little later find it there, and so does the kernel that reads it. Sectors that leave in part cost memory more than
// whole ones.
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
