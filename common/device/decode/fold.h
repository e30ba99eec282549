// Folding the states that are children of one parent, which lie in slots of the workspace (tree_layout.h), left to
// right and with merge_weights() and merge_value() alone: in small steps between leaves, or through shared memory
// behind them.
#pragma once

#include "common/device/decode/partial_state.h"

namespace flashport::FLASHPORT_TARGET {

// Defined by targets that fold so: a copy to shared memory, the wait for all of this thread's, and, among kGroup
// lanes side by side, the largest x of those before this one, -inf in the first.
FLASHPORT_DEVICE void copy_published_vector(float* to, const float* from);
FLASHPORT_DEVICE void await_published();
template <int kGroup>
FLASHPORT_DEVICE float group_max_before(float x);

}  // namespace flashport::FLASHPORT_TARGET

namespace flashport::FLASHPORT_TARGET::decode {

// Folds states in memory left to right: slot 0, then slots second .. count - 1. The threads of the block share the
// pieces out among them, and have several states in flight. sink(place(row, column), row, column, piece) takes the
// results.
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

inline constexpr bool kFoldsStaged = kFoldAtEnd == 0;

// How a state joins those before it, in one row.
struct alignas(16) FoldStep {
  float a, b, l;  // merge_value(acc, a, x, b)
  float m;        // of all states so far
};

// The steps of states 0 .. last in each row, a lane a state, kStates a row; the rows are filled up to whole waves.
// Before a state comes the largest maximum of those that are already in, whatever the order in which that was found.
template <int kStates>
FLASHPORT_DEVICE void fold_steps(int thread, int threads, FoldStep* steps, const float* first, const float* others,
                                 int slot_floats, int live_rows, int last) {
  for (int i = thread; i / kWaveSize * kWaveSize < live_rows * kStates; i += threads) {
    const int row = minimum(i / kStates, live_rows - 1);
    const int state = minimum(i % kStates, last);
    const float* from = state == 0 ? first : others + static_cast<unsigned>(state * slot_floats);
    const float m = load_published(from + row);
    const float l = load_published(from + live_rows + row);
    const merge::MergeWeights w = merge::merge_weights(group_max_before<kStates>(m), m);
    steps[i] = {w.a, w.b, l, w.m};
  }
}

// What a fold takes of `kFloats` of scratch memory: the steps of its rows, and for all states of kRoom pieces the rest.
template <int kRows, int kFloats>
struct FoldScratch {
  static constexpr int kStepFloats = (kRows * kFanOut + kWaveSize) * static_cast<int>(sizeof(FoldStep) / sizeof(float));
  static constexpr int kRoom = (kFloats - kStepFloats) / (kFanOut * kVectorFloats);
};
template <class Tiles>
constexpr bool folds_halves() {
  if constexpr (kFoldsStaged) {
    return FoldScratch<Tiles::kRows, Tiles::kScratchFloats / 2>::kRoom >= kWaveSize;
  } else {
    return false;
  }
}

// The same behind the loop, where nothing hides how long it takes and a wave waits for every instruction that it meets
// for the first time: little code, which loops, and all states of as many pieces as `scratch` holds on their way to
// shared memory at once. By part `part` of kParts of the block's threads; the other parts do the same side by side.
template <int kDv, int kRows, int kScratchFloats, int kParts, class Place, class Sink>
FLASHPORT_DEVICE void fold_states_staged(const Block& block, int part, float* scratch, const float* slots,
                                         int slot_floats, int live_rows, int second, int count, const Place& place,
                                         const Sink& sink) {
  constexpr int kPieces = kDv / kVectorFloats;
  constexpr int kFloats = kScratchFloats / kParts;
  using Scratch = FoldScratch<kRows, kFloats>;
  static_assert(Scratch::kRoom >= kWaveSize && kFloats % kVectorFloats == 0);
  struct alignas(sizeof(float) * kVectorFloats) Columns {
    float at[kVectorFloats];
  };
  const int all_threads = block.threads() / kParts;
  // Behind recompute() with all that follows from it, or the loop has fewer registers.
  const int thread = recompute(block.thread() - part * all_threads);
  live_rows = recompute(live_rows);
  const int last = count - second;
  const float* others = slots + (second - 1) * slot_floats;  // state s > 0 is s slots further on
  auto* steps = reinterpret_cast<FoldStep*>(scratch + part * kFloats);
  // Each of `threads` threads has a column of `staged`: of all states of a piece, then those of its next one.
  auto* staged = reinterpret_cast<Columns*>(scratch + part * kFloats + Scratch::kStepFloats);
  const int threads = minimum(all_threads, Scratch::kRoom);
  const int at_once = Scratch::kRoom / threads * threads * (last < kFanOut / 4 ? 4 : 1);  // few states take less
  const int pieces = live_rows * kPieces;
  for (int first = 0; first < pieces; first += at_once) {
    const int begin = thread < threads ? first + thread : pieces;
    const int end = minimum(first + at_once, pieces);
    Columns* copy = staged + thread;
    FLASHPORT_UNROLL(1)
    for (int i = begin; i < end; i += threads) {
      const int offset = slot_output_offset(live_rows) + i * kVectorFloats;
      copy_published_vector(copy->at, slots + offset);
      copy += threads;
      FLASHPORT_UNROLL(1)
      for (int state = 1; state <= last; ++state, copy += threads) {
        copy_published_vector(copy->at, others + static_cast<unsigned>(state * slot_floats + offset));
      }
    }
    if (first == 0) fold_steps<kFanOut>(thread, all_threads, steps, slots, others, slot_floats, live_rows, last);
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
        acc.l = merge::merge_value(acc.l, joins.a, joins.l, joins.b);
        for (int j = 0; j < kVectorFloats; ++j) sum.at[j] = merge::merge_value(sum.at[j], joins.a, x.at[j], joins.b);
      }
      acc.m = step[last].m;
      for (int j = 0; j < kVectorFloats; ++j) acc.o[j] = sum.at[j];
      sink(place(row, column), row, column, acc);
    }
  }
}

}  // namespace flashport::FLASHPORT_TARGET::decode
