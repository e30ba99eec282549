// Combines a slice of the partial results of a tile that blocks have published (chunks.h): the chunks of each group
// left to right, then the groups left to right, with merge_weights() and merge_value() alone.
#pragma once

#include "common/device/decode/partial_state.h"

namespace flashport::FLASHPORT_TARGET::decode {

// The numbers of the partial results of a tile's chunks, in order; -1 where there is none of its own, because the tile
// has fewer chunks, or the group's first chunk stands for the whole group.
struct PartialList {
  static constexpr int kPadded = kMostChunks + kGroupsAtOnce * kGroupChunks;
  int numbers[kPadded];
};

// The slices of number `slice` of all partial results.
struct PartialSlices {
  const float* first;
  std::int64_t stride;  // floats from a partial result to the next

  FLASHPORT_DEVICE PartialSlices(const DecodeParams& p, int slice)
      : first(p.partials + static_cast<std::int64_t>(slice) * p.slice_floats),
        stride(static_cast<std::int64_t>(p.slices) * p.slice_floats) {}
};

// Joining a result that is not there changes no bit, so that there is no branch on what there is.
FLASHPORT_DEVICE void load_partial(StatePiece& x, const PartialSlices& partials, int number, const PieceAt& at) {
  if (number >= 0) {
    load_piece(x, partials.first + number * partials.stride, at);
  } else {
    x.m = -kInfinity;
    x.l = 0.0f;
    for (int i = 0; i < kVectorFloats; ++i) x.o[i] = -0.0f;
  }
}

// Whether each group of the tile is one result.
FLASHPORT_DEVICE bool has_whole_groups(const PartialList& list, int chunks) {
  for (int chunk = 1; chunk < chunks; chunk += kGroupChunks) {
    if (list.numbers[chunk] >= 0) return false;
  }
  return true;
}

// Combines kPieces pieces of the listed results, which are all in flight together. kWholeGroups: each group is one.
template <bool kWholeGroups, int kPieces>
FLASHPORT_DEVICE void combine_pieces(StatePiece (&tile)[kPieces], const PieceAt (&at)[kPieces],
                                     const PartialSlices& partials, const PartialList& list, int chunks) {
  constexpr int kResults = kGroupsAtOnce * kGroupChunks;
  constexpr int kStep = kWholeGroups ? kGroupChunks : 1;  // chunks from a result to the next
  FLASHPORT_UNROLL(1)
  for (int first = 0; first < chunks; first += kResults * kStep) {
    StatePiece next[kPieces][kResults];
    FLASHPORT_UNROLL(16)
    for (int j = 0; j < kResults; ++j) {
      const int number = first + j * kStep < chunks ? list.numbers[first + j * kStep] : -1;
      FLASHPORT_UNROLL(4)
      for (int piece = 0; piece < kPieces; ++piece) load_partial(next[piece][j], partials, number, at[piece]);
    }
    FLASHPORT_UNROLL(4)
    for (int piece = 0; piece < kPieces; ++piece) {
      auto& results = next[piece];
      constexpr int kGroup = kWholeGroups ? 1 : kGroupChunks;
      FLASHPORT_UNROLL(16)
      for (int group = 0; group < kResults; group += kGroup) {
        FLASHPORT_UNROLL(4)
        for (int j = 1; j < kGroup; ++j) merge(results[group], results[group + j]);
        if (first + group == 0) {
          tile[piece] = results[0];
        } else {
          merge(tile[piece], results[group]);
        }
      }
    }
  }
}

// `threads` (as a Block: thread() of threads()) share the pieces out among them, kPieces each at a time, and have
// several results in flight. sink(place(at), at, piece) takes what was combined.
template <int kColumns, int kPieces, class Threads, class Place, class Sink>
FLASHPORT_DEVICE void combine_partials(const Threads& threads, const PartialSlices& partials, int rows,
                                       const PartialList& list, int chunks, const Place& place, const Sink& sink) {
  constexpr int kOfRow = kColumns / kVectorFloats;
  const int pieces = rows * kOfRow;
  const bool whole_groups = has_whole_groups(list, chunks);
  for (int i = recompute(threads.thread()); i < pieces; i += kPieces * threads.threads()) {
    PieceAt at[kPieces];
    FLASHPORT_UNROLL(4)
    for (int piece = 0; piece < kPieces; ++piece) {
      // Beyond the end a piece is combined again, and not taken.
      const int number = i + piece * threads.threads() < pieces ? i + piece * threads.threads() : i;
      at[piece] = {rows, kColumns, number / kOfRow, number % kOfRow * kVectorFloats};
    }
    StatePiece tile[kPieces];
    if (whole_groups) {
      combine_pieces<true>(tile, at, partials, list, chunks);
    } else {
      combine_pieces<false>(tile, at, partials, list, chunks);
    }
    FLASHPORT_UNROLL(4)
    for (int piece = 0; piece < kPieces; ++piece) {
      if (i + piece * threads.threads() < pieces) sink(place(at[piece]), at[piece], tile[piece]);
    }
  }
}

}  // namespace flashport::FLASHPORT_TARGET::decode
