// Combines the partial results of a tile that blocks have published (chunks.h): the chunks of each group left to right,
// then the groups left to right, with merge_weights() and merge_value() alone.
#pragma once

#include "common/device/decode/partial_state.h"

namespace flashport::FLASHPORT_TARGET::decode {

// The numbers of the partial results of a tile's chunks, in order; -1 where there is none of its own, because the tile
// has fewer chunks, or the group's first chunk stands for the whole group.
struct PartialList {
  static constexpr int kPadded = kMostChunks + kGroupsAtOnce * kGroupChunks;
  int numbers[kPadded];
};

// Joining a result that is not there changes no bit, so that there is no branch on what there is.
FLASHPORT_DEVICE void load_partial(StatePiece& x, const float* partials, int floats, int number, int live_rows, int row,
                                   int dv, int column) {
  if (number >= 0) {
    load_piece(x, partials + std::int64_t{number} * floats, live_rows, row, dv, column);
  } else {
    x.m = -kInfinity;
    x.l = 0.0f;
    for (int i = 0; i < kVectorFloats; ++i) x.o[i] = -0.0f;
  }
}

// The threads of the block share the pieces out among them, and have the results of several groups in flight.
// sink(place(row, column), row, column, piece) takes what was combined.
template <int kDv, class Place, class Sink>
FLASHPORT_DEVICE void combine_partials(const Block& block, const float* partials, int floats, int live_rows,
                                       const PartialList& list, int chunks, const Place& place, const Sink& sink) {
  constexpr int kPieces = kDv / kVectorFloats;
  constexpr int kAtOnce = kGroupsAtOnce * kGroupChunks;
  for (int i = block.thread(); i < live_rows * kPieces; i += block.threads()) {
    const int row = i / kPieces;
    const int column = i % kPieces * kVectorFloats;
    StatePiece tile;
    FLASHPORT_UNROLL(1)
    for (int first = 0; first < chunks; first += kAtOnce) {
      StatePiece next[kAtOnce];
      FLASHPORT_UNROLL(16)
      for (int j = 0; j < kAtOnce; ++j) {
        load_partial(next[j], partials, floats, list.numbers[first + j], live_rows, row, kDv, column);
      }
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
    sink(place(row, column), row, column, tile);
  }
}

}  // namespace flashport::FLASHPORT_TARGET::decode
