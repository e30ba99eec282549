// The combine as a launch of its own, after the one that published: for states so large that a multiprocessor takes
// long to read those of a tile. Several blocks share the pieces of each tile. The folds and their order are the same.
#pragma once

#include <type_traits>

#include "common/device/decode/combine.h"
#include "common/device/decode/output.h"
#include "common/device/decode/schedule.h"

namespace flashport::FLASHPORT_TARGET::decode {

struct CombineShared {
  PartialList list;
};

// As many results of a piece are in flight, where there are so many: those that are not there cost instructions, too.
inline constexpr int kCombineAtOnce = 16;

// One part of the block's tile: a thread a piece.
struct PartThreads {
  int first, count;
  FLASHPORT_DEVICE int thread() const { return first; }
  FLASHPORT_DEVICE int threads() const { return count; }
};

// The tile as a whole, and how the blocks of the launch before have cut the line.
struct TileOnLine {
  Segment segment;
  Line line;
  int first_block;  // that of work range 0 which walks through such tiles
};

template <class Params>
FLASHPORT_DEVICE TileOnLine find_tile(const Params& p, const Block& block, int seq, int tile) {
  const int from = block.lane() * sequences_of_lane(p);
  const int to = minimum(from + sequences_of_lane(p), p.batch);
  int mine = 0, mine_before = 0;
  Span span{};  // of the last one
  for (int i = from; i < to; ++i) {
    span = sequence_span(p, i, key_count(p, i));
    mine += span.leaves;
    mine_before += i < seq ? span.leaves : 0;
  }
  int leaves, before;
  block.wave_exclusive_scan(mine, leaves);
  block.wave_exclusive_scan(mine_before, before);
  TileOnLine on;
  on.line = cut_line(p, leaves, p.cuts[0].ranges.value, broadcast_span(block, span, 0));
  const LineCut& cut = p.cuts[on.line.cut];
  const int row = divide(tile, cut.concurrent);
  on.first_block = tile - row * static_cast<int>(cut.concurrent.value);
  Segment& s = on.segment;
  s = open_sequence(p, seq, key_count(p, seq));
  s.start = before * cut.rows + row * s.span();
  s.first = 0;
  s.last = s.leaves;
  set_tile(p, s, tile);
  return on;
}

// Block index: the part of a slice is the fastest, then the slice, the tile and the sequence. await() returns when the
// launch before has published. What is read before it, lengths and no more, that launch has waited for itself.
template <class Params, class Await>
FLASHPORT_DEVICE void decode_combine(const Params& p, const Block& block, CombineShared& shared, const Await& await) {
  const int parts = p.combine.parts;
  const int tiles = p.num_kv_heads * p.row_tiles;
  const auto index = static_cast<int>(block.index());
  const int part = index % parts;
  const int slice = index / parts % p.slices;
  const int number = index / parts / p.slices;
  const int seq = number / tiles;
  const TileOnLine on = find_tile(p, block, seq, number - seq * tiles);
  const Segment& s = on.segment;
  const int chunks = s.chunks_before(s.leaves);
  const int last_chunk = s.start + (chunks - 1) * s.chunk.leaves;
  const bool whole = on.line.range_of(s.start) == on.line.range_of(last_chunk);  // one block had it
  if (!whole) list_partials(p, block, shared.list, s, on.line, chunks, on.first_block);
  await();
  if (whole) return;
  block.sync();
  const PartThreads threads{part * block.threads() + block.thread(), parts * block.threads()};
  const int tile_rows = p.slices / p.combine.column_slices * p.combine.rows;
  const int first_row = slice / p.combine.column_slices * p.combine.rows;
  const int first_column = slice % p.combine.column_slices * p.combine.columns;
  const int rows = maximum(minimum(p.combine.rows, p.group_size * s.q_len - s.row_tile * tile_rows - first_row), 0);
  const auto place = [&](const PieceAt& at) {
    return output_row(p, s, block, query_row(p, s, tile_rows, first_row + at.row), first_column + at.column == 0);
  };
  const auto sink = [&](const OutputRow& out, const PieceAt& at, const StatePiece& piece) {
    write_output_piece(p, out, first_column + at.column, piece);
  };
  const PartialSlices partials(p, slice);
  shared.list.whole_groups = has_whole_groups(shared.list, chunks);
  const int results = shared.list.whole_groups ? (chunks + kGroupChunks - 1) / kGroupChunks : chunks;
  const auto combine = [&](auto at_once) {
    combine_partials<at_once()>(threads, partials, rows, p.combine.columns, shared.list, chunks, place, sink);
  };
  if (results <= kCombineAtOnce / 4) {
    combine(std::integral_constant<int, kCombineAtOnce / 4>{});
  } else if (results <= kCombineAtOnce / 2) {
    combine(std::integral_constant<int, kCombineAtOnce / 2>{});
  } else {
    combine(std::integral_constant<int, kCombineAtOnce>{});
  }
}

}  // namespace flashport::FLASHPORT_TARGET::decode
