// The launch after one that has read segments one after the other: combines the partial results of each segment as
// decode_combine() does, and joins the segments' states in the order of that kernel, those of 16 bits first.
#pragma once

#include "common/device/decode/combine_kernel.h"

namespace flashport::FLASHPORT_TARGET::decode {

struct CombineSegmentsShared {
  PartialList lists[kMostSegments];
  int chunks[kMostSegments];                        // that the list has: one, where a block had the tile whole
  StatePiece pieces[kMostSegments][4 * kWaveSize];  // that the block is combining
};

// Lists what blocks have published of a tile of one segment. The block's waves do so for one segment each.
template <class Threads>
FLASHPORT_DEVICE void list_segment(const SegmentDecodeParams& p, const Block& block, const Threads& wave,
                                   PartialList& list, int& chunks, int seq, int tile) {
  const TileOnLine on = find_tile(p, block, seq, tile);
  const Segment& s = on.segment;
  const int all = s.chunks_before(s.leaves);
  const bool whole = on.line.range_of(s.start) == on.line.range_of(s.start + ((all - 1) << s.chunk_shift));
  if (whole) {
    if (wave.thread() == 0) list.numbers[0] = static_cast<int>(whole_tile_number(p, s.seq, s.kv_head));
  } else {
    list_partials(p, wave, list, s, on.line, all, on.first_block);
  }
  wave.sync();
  if (wave.thread() == 0) {
    chunks = whole ? 1 : all;
    list.whole_groups = has_whole_groups(list, chunks);
  }
}

// A thread of its own for the piece that begins at a place of a slice.
struct PieceThread {
  int piece;
  FLASHPORT_DEVICE explicit PieceThread(const PieceAt& at) : piece((at.row * at.columns + at.column) / kVectorFloats) {}
  FLASHPORT_DEVICE int thread() const { return piece; }
  FLASHPORT_DEVICE static int threads() { return 1 << 30; }
};

// A piece of the tile of one segment. Few results are in flight: one that is not there costs instructions, too, and
// longer code takes longer to fetch than more trips take.
FLASHPORT_DEVICE StatePiece segment_piece(const PartialSlices& partials, const PartialList& list, int chunks,
                                          const PieceAt& at) {
  StatePiece piece;
  if (chunks == 1) {
    load_partial(piece, partials, list.numbers[0], at);
  } else {
    combine_partials<kGroupChunks>(
        PieceThread(at), partials, at.rows, at.columns, list, chunks, [](const PieceAt&) { return 0; },
        [&](int, const PieceAt&, const StatePiece& combined) { piece = combined; });
  }
  return piece;
}

// Block index: the part is the fastest, then the tile and the sequence. await() as for decode_combine(). Where the
// blocks of a tile have threads enough, each has a piece of one segment, and the results of all segments are on their
// way together.
template <class Await>
FLASHPORT_DEVICE void combine_segments(const SegmentsDecodeParams& p, const Block& block, CombineSegmentsShared& shared,
                                       const Await& await) {
  static_assert(kMostSegments <= 4, "a block has four waves");
  const DecodeParams& first = p.segments[0];
  const int parts = first.combine.parts;
  const auto index = static_cast<int>(block.index());
  const int number = index / parts, seq = number / first.num_kv_heads, head = number - seq * first.num_kv_heads;
  const int wave = block.wave();
  if (wave < p.count) {
    list_segment(p.segments[wave], block, Wave(), shared.lists[wave], shared.chunks[wave], seq, head);
  }
  await();
  block.sync();
  Segment s{};
  s.seq = seq;
  s.kv_head = head;
  s.q_len = 1;
  const int rows = first.group_size, pieces_of_row = first.head_dim_v / kVectorFloats;
  const int pieces = rows * pieces_of_row;
  const int share = block.threads() / p.count;
  const int side_by_side = pieces <= parts * share ? p.count : 1;  // segments
  const int at_once = side_by_side > 1 ? share : block.threads();  // pieces of the block
  const int first_segment = block.thread() / at_once, place = block.thread() - first_segment * at_once;
  FLASHPORT_UNROLL(1)
  for (int from = (index - number * parts) * at_once; from < pieces; from += parts * at_once) {
    const int i = from + place, row = i / pieces_of_row, column = i % pieces_of_row * kVectorFloats;
    const bool exists = first_segment < side_by_side && i < pieces;
    FLASHPORT_UNROLL(1)
    for (int j = first_segment; exists && j < p.count; j += side_by_side) {
      const SegmentDecodeParams& its = p.segments[j];
      const int slice = column / its.combine.columns;
      const PieceAt at{rows, its.combine.columns, row, column - slice * its.combine.columns};
      const float scale = kv::head_scale(its.v_scale, its.scale_stride, head);
      StatePiece piece = segment_piece(PartialSlices(its, slice), shared.lists[j], shared.chunks[j], at);
      for (float& x : piece.o) x = mul_rn(x, scale);
      shared.pieces[j][place] = piece;
    }
    block.sync();
    if (exists && first_segment == 0) {
      StatePiece all = no_piece();
      FLASHPORT_UNROLL(1)
      for (int j = 0; j < p.count; ++j) {
        const StatePiece& piece = shared.pieces[j][place];
        if (piece.l != 0.0f) merge(all, piece);  // else the row sees none of its keys
      }
      OutputRow to = output_row(first, s, block, query_row(first, s, rows, row), column == 0);
      to.scale = 1.0f;
      write_output_piece(first, to, column, all);
    }
    block.sync();  // before the next pieces take their place
  }
}

}  // namespace flashport::FLASHPORT_TARGET::decode
