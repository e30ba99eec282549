// A slice of a partial result in memory (chunks.h has its layout): stored whole from registers, and read, merged and
// written a few columns of a row at a time.
#pragma once

#include "common/device/decode/chunks.h"
#include "common/device/merge/online_softmax.h"

namespace flashport::FLASHPORT_TARGET::decode {

template <class Tiles>
FLASHPORT_DEVICE void store_state(const Tiles& tiles, float* to, const merge::SoftmaxState<Tiles>& state) {
  const auto rows = static_cast<unsigned>(tiles.slice_rows());
  tiles.store_rows(state.m, state.l, to);
  tiles.store_tile(state.o, to + static_cast<unsigned>(slice_output_offset(rows)));
}

// A few columns of one row of a state.
struct StatePiece {
  float m, l;
  float o[kVectorFloats];
};

// Joining it changes no bit of another one.
FLASHPORT_DEVICE StatePiece no_piece() {
  StatePiece x{-kInfinity, 0.0f, {}};
  for (int i = 0; i < kVectorFloats; ++i) x.o[i] = -0.0f;
  return x;
}

// Where a piece lies in a slice of so many rows and columns.
struct PieceAt {
  int rows, columns;
  int row, column;

  FLASHPORT_DEVICE std::int64_t output() const {
    return slice_output_offset(rows) + static_cast<std::int64_t>(row) * columns + column;
  }
};

FLASHPORT_DEVICE void load_piece(StatePiece& x, const float* slice, const PieceAt& at) {
  load_published_pair(x.m, x.l, slice + 2 * at.row);
  load_published_vector(x.o, slice + at.output());
}

FLASHPORT_DEVICE void write_piece(const StatePiece& x, float* slice, const PieceAt& at) {
  if (at.column == 0) {
    slice[2 * at.row] = x.m;
    slice[2 * at.row + 1] = x.l;
  }
  store_published_vector(slice + at.output(), x.o);
}

FLASHPORT_DEVICE void merge(StatePiece& acc, const StatePiece& x) {
  const merge::MergeWeights w = merge::merge_weights(acc.m, x.m);
  acc.m = w.m;
  acc.l = merge::merge_value(acc.l, w.a, x.l, w.b);
  for (int i = 0; i < kVectorFloats; ++i) acc.o[i] = merge::merge_value(acc.o[i], w.a, x.o[i], w.b);
}

}  // namespace flashport::FLASHPORT_TARGET::decode
