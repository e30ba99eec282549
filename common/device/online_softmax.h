// The partial result of one softmax over some keys, per query row: m = max of the base-2 logits, l = sum of
// exp2(logit - m), o = sum of exp2(logit - m) * v, not yet divided by l. The results of disjoint key sets (leaves,
// nodes) meet by merge_weights() and merge_value() alone, in which every operation is explicit, so that equal trees
// give equal bits on every path.
#pragma once

#include "common/device/tree_layout.h"
#include FLASHPORT_TARGET_HEADER

namespace flashport::FLASHPORT_TARGET {

struct MergeWeights {
  float m, a, b;
};

// Weights of two partial results with maxima m_a and m_b. -inf on both sides gives weights 0, never NaN.
FLASHPORT_DEVICE MergeWeights merge_weights(float m_a, float m_b) {
  const float m = maximum(m_a, m_b);
  const float finite = m == -kInfinity ? 0.0f : m;
  return {m, exp2_approx(m_a - finite), exp2_approx(m_b - finite)};
}

FLASHPORT_DEVICE float merge_value(float acc, float a, float x, float b) { return fma_rn(x, b, mul_rn(acc, a)); }

template <class Tiles>
struct SoftmaxState {
  typename Tiles::Rows m, l;
  typename Tiles::Out o;
};

// acc = acc joined with x
template <class Tiles>
FLASHPORT_DEVICE void merge(const Tiles& tiles, SoftmaxState<Tiles>& acc, const SoftmaxState<Tiles>& x) {
  typename Tiles::Rows a, b;
  for (int slot = 0; slot < tiles.row_slots(); ++slot) {
    const MergeWeights w = merge_weights(acc.m[slot], x.m[slot]);
    acc.m[slot] = w.m;
    acc.l[slot] = merge_value(acc.l[slot], w.a, x.l[slot], w.b);
    a[slot] = w.a;
    b[slot] = w.b;
  }
  tiles.for_each_pair(acc.o, x.o,
                      [&](float& to, float from, int slot) { to = merge_value(to, a[slot], from, b[slot]); });
}

// A state's place in memory (tree_layout.h): m [live rows], l [live rows], o [live rows, DV].
template <class Tiles>
FLASHPORT_DEVICE void store_state(const Tiles& tiles, float* slot, const SoftmaxState<Tiles>& state) {
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
  const MergeWeights w = merge_weights(acc.m, x.m);
  acc.m = w.m;
  acc.l = merge_value(acc.l, w.a, x.l, w.b);
  for (int i = 0; i < kVectorFloats; ++i) acc.o[i] = merge_value(acc.o[i], w.a, x.o[i], w.b);
}

// Folds states in memory left to right: slot 0, then slots second .. count - 1. The threads of the block share the
// pieces out among them, and have several states in flight. sink(place(row, column), row, column, piece) takes the
// results; place is asked for while the states are on their way.
template <int kDv, int kAtOnce, class Place, class Sink>
FLASHPORT_DEVICE void fold_states(const Block& block, const float* slots, int slot_floats, int live_rows, int second,
                                  int count, const Place& place, const Sink& sink) {
  constexpr int kPieces = kDv / kVectorFloats;
  for (int i = block.thread(); i < live_rows * kPieces; i += block.threads()) {
    const int row = i / kPieces;
    const int column = i % kPieces * kVectorFloats;
    StatePiece acc;
    load_piece(acc, slots, live_rows, row, kDv, column);
    for (int first = second; first < count; first += kAtOnce) {
      StatePiece next[kAtOnce];
      FLASHPORT_UNROLL(16)
      for (int j = 0; j < kAtOnce; ++j) {
        const int state = minimum(first + j, count - 1);  // loaded without a branch, which would tie up registers
        load_piece(next[j], slots + std::int64_t{state} * slot_floats, live_rows, row, kDv, column);
      }
      FLASHPORT_UNROLL(16)
      for (int j = 0; j < kAtOnce; ++j) {
        if (first + j < count) merge(acc, next[j]);
      }
    }
    sink(place(row, column), row, column, acc);
  }
}

// Defined by targets whose waves have many lanes.
template <int kGroup>
FLASHPORT_DEVICE float group_max_before(float x);
template <int kGroup>
FLASHPORT_DEVICE float group_broadcast(float x, int lane);

// The same where few blocks do it at the end and nothing hides it: kStates states at most, all of them of kAtOnce
// pieces in flight at once, and lanes work out their weights side by side, a lane a state. Before a state comes the
// largest maximum of those that are already in, whatever the order in which that was found.
template <int kDv, int kStates, int kAtOnce, class Place, class Sink>
FLASHPORT_DEVICE void fold_states_at_once(const Block& block, const float* slots, int slot_floats, int live_rows,
                                          int second, int count, const Place& place, const Sink& sink) {
  constexpr int kPieces = kDv / kVectorFloats;
  static_assert(kPieces % kStates == 0 && kWaveSize % kStates == 0, "a row's lanes hold a state each");
  const int thread = recompute(block.thread());  // and all that follows from it, or the loop has fewer registers
  live_rows = recompute(live_rows);
  const int last = count - second;
  const float* others = slots + (second - 1) * slot_floats;  // slot 0 and the others, if that is the only one
  const int lane = thread % kStates;
  const float* mine = lane == 0 ? slots : others + minimum(lane, last) * slot_floats;
  for (int first = thread; first / kWaveSize * kWaveSize < live_rows * kPieces; first += kAtOnce * block.threads()) {
    float m[kAtOnce], l[kAtOnce], o[kAtOnce][kStates][kVectorFloats];
    decltype(place(0, 0)) to[kAtOnce];
    FLASHPORT_UNROLL(16)
    for (int piece = 0; piece < kAtOnce; ++piece) {
      const int i = first + piece * block.threads();
      const int row = minimum(i / kPieces, live_rows - 1);
      const int column = i % kPieces * kVectorFloats;
      const int offset = slot_output_offset(live_rows) + row * kDv + column;
      load_published_vector(o[piece][0], slots + offset);
      const float* next = others + offset;
      FLASHPORT_UNROLL(16)
      for (int state = 1; state < kStates; ++state) {  // without a branch: all are on their way
        load_published_vector(o[piece][state], next + static_cast<unsigned>(minimum(state, last) * slot_floats));
      }
      m[piece] = load_published(mine + row);
      l[piece] = load_published(mine + live_rows + row);
      to[piece] = place(row, column);
    }
    FLASHPORT_UNROLL(16)
    for (int piece = 0; piece < kAtOnce; ++piece) {
      const float m_or_none = lane <= last ? m[piece] : -kInfinity;
      const MergeWeights w = merge_weights(group_max_before<kStates>(m_or_none), m_or_none);
      StatePiece acc;
      acc.m = group_broadcast<kStates>(w.m, kStates - 1);
      acc.l = group_broadcast<kStates>(l[piece], 0);
      for (int j = 0; j < kVectorFloats; ++j) acc.o[j] = o[piece][0][j];
      FLASHPORT_UNROLL(16)
      for (int state = 1; state < kStates; ++state) {
        const float a = group_broadcast<kStates>(w.a, state);
        const float b = group_broadcast<kStates>(w.b, state);
        const float next_l = group_broadcast<kStates>(l[piece], state);
        if (state <= last) {
          acc.l = merge_value(acc.l, a, next_l, b);
          for (int j = 0; j < kVectorFloats; ++j) acc.o[j] = merge_value(acc.o[j], a, o[piece][state][j], b);
        }
      }
      const int i = first + piece * block.threads();
      if (i < live_rows * kPieces) sink(to[piece], i / kPieces, i % kPieces * kVectorFloats, acc);
    }
  }
}

}  // namespace flashport::FLASHPORT_TARGET
