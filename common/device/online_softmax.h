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

// Defined by targets with kFoldsStaged: a copy to shared memory, the wait for all of this thread's, and, among kGroup
// lanes side by side, the largest x of those before this one, -inf in the first.
FLASHPORT_DEVICE void copy_published_vector(float* to, const float* from);
FLASHPORT_DEVICE void await_published();
template <int kGroup>
FLASHPORT_DEVICE float group_max_before(float x);

// How a state joins those before it, in one row.
struct alignas(16) FoldStep {
  float a, b, l;  // merge_value(acc, a, x, b)
  float m;        // of all states so far
};

// The steps of states 0 .. last in each row, a lane a state, kStates a row; the rows are filled up to whole waves.
// Before a state comes the largest maximum of those that are already in, whatever the order in which that was found.
template <int kStates>
FLASHPORT_DEVICE void fold_steps(const Block& block, FoldStep* steps, const float* first, const float* others,
                                 int slot_floats, int live_rows, int last) {
  for (int i = block.thread(); i / kWaveSize * kWaveSize < live_rows * kStates; i += block.threads()) {
    const int row = minimum(i / kStates, live_rows - 1);
    const int state = minimum(i % kStates, last);
    const float* from = state == 0 ? first : others + static_cast<unsigned>(state * slot_floats);
    const float m = load_published(from + row);
    const float l = load_published(from + live_rows + row);
    const MergeWeights w = merge_weights(group_max_before<kStates>(m), m);
    steps[i] = {w.a, w.b, l, w.m};
  }
}

// The same behind the loop, where nothing hides how long it takes and a wave waits for every instruction that it meets
// for the first time: little code, which loops, and all states of as many pieces as `scratch` holds on their way to
// shared memory at once.
template <int kDv, int kRows, int kScratchFloats, class Place, class Sink>
FLASHPORT_DEVICE void fold_states_staged(const Block& block, float* scratch, const float* slots, int slot_floats,
                                         int live_rows, int second, int count, const Place& place, const Sink& sink) {
  constexpr int kPieces = kDv / kVectorFloats;
  constexpr int kStepFloats = (kRows * kFanOut + kWaveSize) * static_cast<int>(sizeof(FoldStep) / sizeof(float));
  constexpr int kRoom = (kScratchFloats - kStepFloats) / (kFanOut * kVectorFloats);  // pieces of all their states
  static_assert(kRoom >= kWaveSize);
  struct alignas(sizeof(float) * kVectorFloats) Columns {
    float at[kVectorFloats];
  };
  const int thread = recompute(block.thread());  // and all that follows from it, or the loop has fewer registers
  live_rows = recompute(live_rows);
  const int last = count - second;
  const float* others = slots + (second - 1) * slot_floats;  // slot 0 and the others, if that is the only one
  auto* steps = reinterpret_cast<FoldStep*>(scratch);
  // Each of `threads` threads has a column of `staged`: of all states of a piece, then those of its next one.
  auto* staged = reinterpret_cast<Columns*>(scratch + kStepFloats);
  const int threads = minimum(block.threads(), kRoom);
  const int at_once = kRoom / threads * threads * (last < kFanOut / 4 ? 4 : 1);
  const int pieces = live_rows * kPieces;
  for (int first = 0; first < pieces; first += at_once) {
    const int begin = thread < threads ? first + thread : pieces;
    const int end = minimum(first + at_once, pieces);
    Columns* to = staged + thread;
    FLASHPORT_UNROLL(1)
    for (int i = begin; i < end; i += threads) {
      const int offset = slot_output_offset(live_rows) + i * kVectorFloats;
      copy_published_vector(to->at, slots + offset);
      to += threads;
      FLASHPORT_UNROLL(1)
      for (int state = 1; state <= last; ++state, to += threads) {
        copy_published_vector(to->at, others + static_cast<unsigned>(state * slot_floats + offset));
      }
    }
    if (first == 0) fold_steps<kFanOut>(block, steps, slots, others, slot_floats, live_rows, last);
    await_published();
    if (first == 0) block.sync();
    const Columns* from = staged + thread;
    FLASHPORT_UNROLL(1)
    for (int i = begin; i < end; i += threads) {
      const int row = i / kPieces;
      const int column = i % kPieces * kVectorFloats;
      const FoldStep* step = steps + row * kFanOut;
      StatePiece acc;
      acc.l = step->l;
      Columns sum = *from;
      from += threads;
      FLASHPORT_UNROLL(4)
      for (int state = 1; state <= last; ++state, from += threads) {
        const FoldStep joins = step[state];
        const Columns x = *from;
        acc.l = merge_value(acc.l, joins.a, joins.l, joins.b);
        for (int j = 0; j < kVectorFloats; ++j) sum.at[j] = merge_value(sum.at[j], joins.a, x.at[j], joins.b);
      }
      acc.m = step[last].m;
      for (int j = 0; j < kVectorFloats; ++j) acc.o[j] = sum.at[j];
      sink(place(row, column), row, column, acc);
    }
  }
}

}  // namespace flashport::FLASHPORT_TARGET
