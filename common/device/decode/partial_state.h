// A partial state of a query tile in memory (tree_layout.h has its layout): stored whole from registers, and read,
// merged and written a few columns of a row at a time.
#pragma once

#include "common/device/decode/tree_layout.h"
#include "common/device/merge/online_softmax.h"

namespace flashport::FLASHPORT_TARGET::decode {

// The layout of a state in memory (tree_layout.h): m [live rows], l [live rows], o [live rows, DV].
template <class Tiles>
FLASHPORT_DEVICE void store_state(const Tiles& tiles, float* slot, const merge::SoftmaxState<Tiles>& state) {
  const auto rows = static_cast<unsigned>(tiles.live_rows());
  tiles.store_rows(state.m, slot);
  tiles.store_rows(state.l, slot + rows);
  tiles.store_tile(state.o, slot + static_cast<unsigned>(slot_output_offset(rows)));
}

// A few columns of one row of a state.
struct StatePiece {
  float m, l;
  float o[kVectorFloats];
};

FLASHPORT_DEVICE void load_piece(StatePiece& x, const float* slot, int live_rows, int row, int dv, int column) {
  x.m = load_published(slot + row);
  x.l = load_published(slot + live_rows + row);
  load_published_vector(x.o, slot + slot_output_offset(live_rows) + static_cast<std::int64_t>(row) * dv + column);
}

FLASHPORT_DEVICE void write_piece(const StatePiece& x, float* state, int live_rows, int row, int dv, int column) {
  if (column == 0) {
    state[row] = x.m;
    state[live_rows + row] = x.l;
  }
  store_published_vector(state + slot_output_offset(live_rows) + static_cast<std::int64_t>(row) * dv + column, x.o);
}

FLASHPORT_DEVICE void merge(StatePiece& acc, const StatePiece& x) {
  const merge::MergeWeights w = merge::merge_weights(acc.m, x.m);
  acc.m = w.m;
  acc.l = merge::merge_value(acc.l, w.a, x.l, w.b);
  for (int i = 0; i < kVectorFloats; ++i) acc.o[i] = merge::merge_value(acc.o[i], w.a, x.o[i], w.b);
}

}  // namespace flashport::FLASHPORT_TARGET::decode
