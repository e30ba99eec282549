// Where keys and values lie in LDS for attention. Plain C++, so that tests can count bank conflicts.
//
// The unit is a vector of eight 16-bit values. A row of keys [keys, D] has D / 8 vectors, a row of the transposed
// values [DV, keys] has keys / 8. LDS has 32 banks of four bytes, which eight vectors side by side fill: a line. Lanes
// that read or write at the same time have vectors of the same number in eight rows, so a row's vectors change places
// by an exclusive or with some bits of the row's number.
#pragma once

namespace flashport {

inline constexpr int kVectorBytes = 16, kLineBytes = 128;

// The place of a vector in its row of keys, or the vector that has a place: the change of places is its own inverse.
// Eight rows have places of their own, or kPlaces 16, for LDS that serves 16 vectors at a time (CDNA4).
template <int kVectors, int kPlaces>
constexpr int key_place(int key, int vector) {
  static_assert(kVectors % 8 == 0);
  return vector ^ key % (kVectors < kPlaces ? kVectors : kPlaces);
}
// Byte offset of a vector of keys.
template <int kVectors, int kPlaces>
constexpr int key_offset(int key, int vector) {
  return (key * kVectors + key_place<kVectors, kPlaces>(key, vector)) * kVectorBytes;
}
// From the offset of vector h (0 or 1) of a row of keys to that of vector 2 pair + h.
template <int kVectors, int kPlaces>
constexpr int key_pair_offset(int offset, int pair) {
  constexpr int kPairs = (kVectors < kPlaces ? kVectors : kPlaces) / 2;
  return (offset ^ pair % kPairs * 2 * kVectorBytes) + pair / kPairs * kPairs * 2 * kVectorBytes;
}

// From the offset of a vector of keys to that of the vector `vectors` further on of the key `keys` further on:
// multiples of powers of two above all that differs in the first one's place.
template <int kVectors, int kPlaces>
constexpr int further_key_offset(int offset, int keys, int vectors) {
  constexpr int kChanging = kVectors < kPlaces ? kVectors : kPlaces;
  return (offset ^ keys % kChanging * kVectorBytes) + (keys * kVectors + vectors) * kVectorBytes;
}

template <int kV, int kPlaces>
struct KeyRows {
  static constexpr int kVectors = kV;
  static constexpr int offset(int key, int vector) { return key_offset<kVectors, kPlaces>(key, vector); }
  static constexpr int further(int offset, int keys, int vectors) {
    return further_key_offset<kVectors, kPlaces>(offset, keys, vectors);
  }
};

// Byte offset of a vector of transposed values. If rows are half a line, a line holds two that are four columns apart.
template <int kVectors>
constexpr int value_offset(int column, int vector) {
  static_assert(kVectors == 4 || kVectors % 8 == 0);
  const int mixed = column ^ column / 8 % 4;
  if (kVectors > 4) return (column * kVectors + (vector ^ mixed % 8)) * kVectorBytes;
  const int line = column / 8 * 4 + column % 4;
  return line * kLineBytes + (column / 4 % 2 * 4 + (vector ^ mixed % 4)) * kVectorBytes;
}

// From the offset of vector h (0 or 1) of a column to that of vector 2 pair + h.
constexpr int pair_offset(int offset, int pair) {
  return (offset ^ pair % 4 * 2 * kVectorBytes) + pair / 4 * kLineBytes;
}
// From the offset of a vector of a column that is a multiple of four to that of a column `j` (0 to 3) further on.
template <int kVectors>
constexpr int next_column_offset(int offset, int j) {
  return (offset ^ j * kVectorBytes) + j * (kVectors > 4 ? kVectors * kVectorBytes : kLineBytes);
}

// Byte offset of a four of keys of a column, a half of a vector; and, from there, to the keys `keys` and the columns
// `columns` further on: multiples of 16 and of 32, and of powers of two above the first ones.
template <int kVectors>
constexpr int four_offset(int column, int four) {
  return value_offset<kVectors>(column, four / 2) + four % 2 * 8;
}
template <int kVectors>
constexpr int further_four_offset(int offset, int columns, int keys) {
  return pair_offset(offset, keys / 16) + columns * kVectors * kVectorBytes;
}

// Keys stand in a row of transposed values as the registers of S^T hold them: four 2 v + s, half s of vector v, where v
// is 2 t + h, is keys 16 t + 8 s + 4 h + 0..3, which are what lanes of half h of a wave have of 16 keys.
constexpr int first_key_of_four(int four) { return four / 4 * 16 + four % 2 * 8 + four / 2 % 2 * 4; }

// The same for values [keys, DV]. A read takes four rows, 32 bytes of each in 16 lanes, 64 in 32: rows have their own
// 32 bytes among 128, and their own 64 among 256.
template <int kVectors>
constexpr int value_place(int key, int vector) {
  const int row = key % 4;
  return vector ^ (kVectors > 8 ? row + row % 2 * 4 : row) * 2;
}
// Byte offset of a vector of values [keys, DV].
template <int kVectors>
constexpr int value_vector_offset(int key, int vector) {
  return (key * kVectors + value_place<kVectors>(key, vector)) * kVectorBytes;
}
template <int kV>
struct ValueRows {
  static constexpr int kVectors = kV;
  static constexpr int offset(int key, int vector) { return value_vector_offset<kVectors>(key, vector); }
  // `keys`: a multiple of four; `vectors`: 0, or a multiple of a power of two above the first one's.
  static constexpr int further(int offset, int keys, int vectors) {
    return offset + (keys * kVectors + vectors) * kVectorBytes;
  }
};
// Byte offset in values [keys, DV] of what lane `lane` reads first for the operand of columns 0 to 31 and keys 0 to 15:
// ds_read_b64_tr_b16 transposes 4 keys x 16 columns, of which a lane of 16 has four columns of a key.
template <int kVectors>
constexpr int value_read_offset(int lane) {
  const int key = lane / 32 * 4 + lane % 16 / 4, column = lane / 16 % 2 * 16 + lane % 4 * 4;
  return value_vector_offset<kVectors>(key, column / 8) + column % 8 * 2;
}
// From there to the columns from 32 `block` on, of keys 16 `pair` + 8 `half`.
template <int kVectors>
constexpr int value_read_step(int offset, int block, int pair, int half) {
  return (offset ^ block % (kVectors / 4 < 4 ? kVectors / 4 : 4) * 64) + block / 4 * 256 +
         (16 * pair + 8 * half) * kVectors * kVectorBytes;
}

}  // namespace flashport
