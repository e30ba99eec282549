// Combines a slice of the partial results of a tile that blocks have published (chunks.h): the chunks of each group left
// to right, then the groups left to right, with merge_weights() and merge_value() alone.
#pragma once

#include "common/device/decode/partial_state.h"

namespace flashport::FLASHPORT_TARGET::decode {

// The numbers of the partial results of a tile's chunks, in order; -1 where there is none of its own, because the tile
// has fewer chunks, or the group's first chunk stands for the whole group.
struct PartialList {
  static constexpr int kAtOnce = kGroupsAtOnce * kGroupChunks;
  static constexpr int padded(int chunks) { return (chunks + kAtOnce - 1) / kAtOnce * kAtOnce; }
  static_assert(kMostChunks % kAtOnce == 0);
  int numbers[kMostChunks];
};

// The slices of number `slice` of all partial results.
struct PartialSlices {
  const float* first;
  std::int64_t stride;  // floats from a partial result to the next

  FLASHPORT_DEVICE PartialSlices(const DecodeParams& p, int slice)
      : first(p.partials + static_cast<std::int64_t>(slice) * p.slice_floats),
        stride(static_cast<std::int64_t>(p.slices) * p.slice_floats) {}
};

// Joining a result that is not there changes no bit. There is no branch on what there is, or loads would wait for each
// other; the first result stands in for those that are not.
FLASHPORT_DEVICE void load_partial(StatePiece& x, const PartialSlices& partials, int number, const PieceAt& at) {
  load_piece(x, partials.first + maximum(number, 0) * partials.stride, at);
  const bool there = number >= 0;
  x.m = there ? x.m : -kInfinity;
  x.l = there ? x.l : 0.0f;
  for (int i = 0; i < kVectorFloats; ++i) x.o[i] = there ? x.o[i] : -0.0f;
}

// `threads` (as a Block: thread() of threads()) share the pieces out among them, and have the results of several groups
// in flight. sink(place(at), at, piece) takes what was combined.
template <int kColumns, class Threads, class Place, class Sink>
FLASHPORT_DEVICE void combine_partials(const Threads& threads, const PartialSlices& partials, int rows,
                                       const PartialList& list, int chunks, const Place& place, const Sink& sink) {
  constexpr int kPieces = kColumns / kVectorFloats;
  constexpr int kAtOnce = PartialList::kAtOnce;
  for (int i = threads.thread(); i < rows * kPieces; i += threads.threads()) {
    const PieceAt at{rows, kColumns, i / kPieces, i % kPieces * kVectorFloats};
    StatePiece tile, next[kAtOnce];
    const auto load = [&](int first) {
      FLASHPORT_UNROLL(16)
      for (int j = 0; j < kAtOnce; ++j) load_partial(next[j], partials, list.numbers[first + j], at);
    };
    load(0);
    const auto to = place(at);  // while the first results are on their way
    FLASHPORT_UNROLL(1)
    for (int first = 0; first < chunks; first += kAtOnce) {
      if (first > 0) load(first);
      FLASHPORT_UNROLL(4)
      for (int group = 0; group < kAtOnce; group += kGroupChunks) {
        FLASHPORT_UNROLL(4)
        for (int j = 1; j < kGroupChunks; ++j) merge(next[group], next[group + j]);
        if (first + group == 0) {
          tile = next[0];
        } else {
          merge(tile, next[group]);
        }
      }
    }
    sink(to, at, tile);
  }
}

}  // namespace flashport::FLASHPORT_TARGET::decode
