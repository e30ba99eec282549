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
  tiles.store_rows(state.m, slot);
  tiles.store_rows(state.l, slot + tiles.live_rows());
  tiles.store_tile(state.o, slot + slot_output_offset(tiles.live_rows()));
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
// pieces out among them, and have several states in flight. sink(row, column, piece) takes the results.
template <int kDv, int kAtOnce, class Sink>
FLASHPORT_DEVICE void fold_states(const Block& block, const float* slots, std::int64_t slot_floats, int live_rows,
                                  int second, int count, const Sink& sink) {
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
        load_piece(next[j], slots + state * slot_floats, live_rows, row, kDv, column);
      }
      FLASHPORT_UNROLL(16)
      for (int j = 0; j < kAtOnce; ++j) {
        if (first + j < count) merge(acc, next[j]);
      }
    }
    sink(row, column, acc);
  }
}

// Defined by targets whose tiles have a fold room.
template <int kGroup>
FLASHPORT_DEVICE float group_max_before(float x);
FLASHPORT_DEVICE void store_pair(float* to, float a, float b);
FLASHPORT_DEVICE void load_shared_vector(float (&x)[kVectorFloats], const float* from);
FLASHPORT_DEVICE void store_shared_vector(float* to, const float (&x)[kVectorFloats]);

// The same through the tiles' shared memory of kFoldRoomFloats floats, where the loads of many states are in flight at
// once. The weights of all states are worked out side by side: before a state comes the largest maximum of those that
// are already in, whatever the order in which that was found.
template <class Tiles, class Sink>
FLASHPORT_DEVICE void fold_states_gathered(const Tiles& tiles, const Block& block, const float* slots, int floats,
                                           int second, int count, const Sink& sink) {
  constexpr int kDv = Tiles::kColumns;
  constexpr int kPieces = kDv / kVectorFloats;
  const int live_rows = tiles.live_rows();
  const int head = static_cast<int>(slot_output_offset(live_rows));
  float* weights = tiles.fold_room();                // (a, b) of each state and row
  float* after = weights + 2 * kFanOut * live_rows;  // m and l of the sum with the states of this round
  float* sum = after + head;                         // a state, as all that follow it
  float* before = sum;                               // m and l of the sum without them
  float* states = sum + floats;
  int at_once = kFanOut;
  if constexpr (Tiles::kFoldRoomFloats < Tiles::kFoldRoomForAll) {
    at_once = minimum(at_once, (Tiles::kFoldRoomFloats - 2 * kFanOut * live_rows - head) / floats - 1);
  }
  tiles.copy_published(sum, slots, floats);
  bool done = false;
  for (int first = second; !done; first += at_once) {
    const int here = minimum(at_once, maximum(count - first, 0));  // 0: an only child
    const int last = maximum(here - 1, 0);
    done = first + here >= count;
    tiles.copy_published(states, slots + first * floats, here * floats);
    tiles.await_published();
    for (int i = block.thread(); i < (kFanOut * live_rows + kWaveSize - 1) / kWaveSize * kWaveSize;
         i += block.threads()) {
      const int state = i % kFanOut;
      const int row = minimum(i / kFanOut, live_rows - 1);
      const float m = state < here ? states[state * floats + row] : -kInfinity;
      const MergeWeights w = merge_weights(maximum(before[row], group_max_before<kFanOut>(m)), m);
      if (state < here) store_pair(weights + 2 * (row * kFanOut + state), w.a, w.b);
      if (state == last) after[row] = w.m;
    }
    block.sync();
    for (int i = block.thread(); i < live_rows * kPieces; i += block.threads()) {
      const int row = i / kPieces;
      const int column = i % kPieces * kVectorFloats;
      const float* w = weights + 2 * kFanOut * row;
      const float* next_l = states + live_rows + row;
      const float* next_o = states + head + row * kDv + column;
      StatePiece acc;
      acc.m = after[row];
      acc.l = before[live_rows + row];
      load_shared_vector(acc.o, sum + head + row * kDv + column);
      FLASHPORT_UNROLL(4)
      for (int state = 0; state < here; ++state) {
        float o[kVectorFloats];
        load_shared_vector(o, next_o + state * floats);
        acc.l = merge_value(acc.l, w[2 * state], next_l[state * floats], w[2 * state + 1]);
        for (int j = 0; j < kVectorFloats; ++j) {
          acc.o[j] = merge_value(acc.o[j], w[2 * state], o[j], w[2 * state + 1]);
        }
      }
      if (done) {
        sink(row, column, acc);
      } else {
        store_shared_vector(sum + head + row * kDv + column, acc.o);
        if (column == 0) after[live_rows + row] = acc.l;
      }
    }
    block.sync();
    float* swapped = before;
    before = after;
    after = swapped;
  }
}

}  // namespace flashport::FLASHPORT_TARGET
