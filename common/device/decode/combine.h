// Combines a slice of the partial results of a tile that blocks have published (chunks.h): the chunks of each group
// left to right, then the groups left to right, with merge_weights() and merge_value() alone.
#pragma once

#include "common/device/decode/partial_state.h"
#include "common/device/decode/schedule.h"

namespace flashport::FLASHPORT_TARGET::decode {

// The numbers of the partial results of a tile's chunks, in order; -1 where there is none of its own, because the tile
// has fewer chunks, or the group's first chunk stands for the whole group.
struct PartialList {
  static constexpr int kAtOnce = kGroupsAtOnce * kGroupChunks;
  static constexpr int padded(int chunks) { return (chunks + kAtOnce - 1) / kAtOnce * kAtOnce; }
  static_assert(kMostChunks % kAtOnce == 0);
  int numbers[kMostChunks];
  int counter;        // of the tile's slice: the number of the one that tells when all are there
  bool whole_groups;  // each group is one result
};

// The slices of number `slice` of all partial results.
struct PartialSlices {
  const float* first;
  std::int64_t stride;  // floats from a partial result to the next

  FLASHPORT_DEVICE PartialSlices(const DecodeParams& p, int slice)
      : first(p.partials + static_cast<std::int64_t>(slice) * p.slice_floats),
        stride(static_cast<std::int64_t>(p.slices) * p.slice_floats) {}
};

// Where the results of a tile's chunks lie: a thread a chunk. `first_block`: the block that walks through such tiles in
// work range 0 of the line.
template <class Threads>
FLASHPORT_DEVICE void list_partials(const DecodeParams& p, const Threads& threads, PartialList& list, const Segment& s,
                                    const Line& line, int chunks, int first_block) {
  const auto range_of = [&](int chunk) { return line.range_of(s.start + minimum(chunk, chunks - 1) * s.chunk.leaves); };
  const auto concurrent = static_cast<int>(p.cuts[line.cut].concurrent.value);
  for (int chunk = threads.thread(); chunk < PartialList::padded(chunks); chunk += threads.threads()) {
    const int first = chunk / kGroupChunks * kGroupChunks;
    const int range = range_of(chunk);
    const bool held = range_of(first) == range_of(first + kGroupChunks - 1);
    const int its_begin = range * line.quota;
    const int begin = chunks_until(s, s.start, its_begin);
    const int end = chunks_until(s, s.start, its_begin + line.quota);
    const int index = partial_index(begin, end, chunks, chunk);
    const int block = first_block + range * concurrent;
    const auto number = static_cast<int>(partial_number(block, p.side_partials, begin > 0 ? 0 : 1, index));
    list.numbers[chunk] = chunk < chunks && (chunk == first || !held) ? number : -1;
  }
}

// Joining a result that is not there changes no bit. There is no branch on what there is, or loads would wait for each
// other; the first result stands in for those that are not.
FLASHPORT_DEVICE void load_partial(StatePiece& x, const PartialSlices& partials, int number, const PieceAt& at) {
  load_piece(x, partials.first + maximum(number, 0) * partials.stride, at);
  const bool there = number >= 0;
  x.m = there ? x.m : -kInfinity;
  x.l = there ? x.l : 0.0f;
  for (int i = 0; i < kVectorFloats; ++i) x.o[i] = there ? x.o[i] : -0.0f;
}

// Whether each group of the tile is one result.
FLASHPORT_DEVICE bool has_whole_groups(const PartialList& list, int chunks) {
  for (int chunk = 1; chunk < chunks; chunk += kGroupChunks) {
    if (list.numbers[chunk] >= 0) return false;
  }
  return true;
}

// `threads` (as a Block: thread() of threads()) share the pieces out among them, each with kAtOnce results in flight.
// sink(place(at), at, piece) takes what was combined. Code that runs once is slow by its length, so lists of both kinds
// have one text.
template <int kAtOnce, class Threads, class Place, class Sink>
FLASHPORT_DEVICE void combine_partials(const Threads& threads, const PartialSlices& partials, int rows, int columns,
                                       const PartialList& list, int chunks, const Place& place, const Sink& sink) {
  static_assert(kAtOnce % kGroupChunks == 0);
  const bool whole_groups = list.whole_groups;
  const int step = whole_groups ? kGroupChunks : 1;  // chunks from a result to the next
  const int pieces_of_row = columns / kVectorFloats;
  const int pieces = rows * pieces_of_row;
  FLASHPORT_UNROLL(1)
  for (int i = recompute(threads.thread()); i < pieces; i += threads.threads()) {
    const PieceAt at{rows, columns, i / pieces_of_row, i % pieces_of_row * kVectorFloats};
    StatePiece tile = no_piece();
    decltype(place(at)) to{};
    FLASHPORT_UNROLL(1)
    for (int first = 0; first < chunks; first += kAtOnce * step) {
      StatePiece results[kAtOnce];
      FLASHPORT_UNROLL(32)
      for (int j = 0; j < kAtOnce; ++j) {
        const int chunk = first + j * step;
        load_partial(results[j], partials, chunk < chunks ? list.numbers[chunk] : -1, at);
      }
      if (first == 0) to = place(at);  // while the first results are on their way
      if (whole_groups) {
        FLASHPORT_UNROLL(32)
        for (int j = 0; j < kAtOnce; ++j) merge(tile, results[j]);
      } else {
        FLASHPORT_UNROLL(32)
        for (int group = 0; group < kAtOnce; group += kGroupChunks) {
          FLASHPORT_UNROLL(4)
          for (int j = 1; j < kGroupChunks; ++j) merge(results[group], results[group + j]);
          merge(tile, results[group]);
        }
      }
    }
    sink(to, at, tile);
  }
}

}  // namespace flashport::FLASHPORT_TARGET::decode
