// The tile scheduler: which block works on what. The query tiles of a sequence (kv head, then rows of its packed group)
// form rows of concurrent tiles, a block for each tile of a row: heads that share pages read them together, from memory
// that is near. The work is a line of leaves (64 keys of one such row): sequence by sequence, row by row, leaf by leaf.
// Each work range takes `quota` leaves of it, and a chunk (chunks.h) belongs to the range that holds its first leaf.
// The line is never stored: each wave scans the leaf counts of the batch and finds the beginning of its range, without
// a barrier. A sequence without keys counts one leaf, so that a block writes its output. With fixed chunks (stage 1,
// num_splits) a block is one chunk of one tile instead.
#pragma once

#include <type_traits>

#include "common/device/core/divide.h"
#include "common/device/decode/chunks.h"
#include "common/device/decode/segments.h"

namespace flashport::FLASHPORT_TARGET::decode {

// The part of a query tile that this block works on.
struct Segment {
  int seq;
  int kv_head, row_tile;      // the query tile: rows of this head's packed group
  int length;                 // keys of the sequence
  int q_len, q_begin;         // query tokens of the sequence; its first row in ragged tensors
  int key_begin;              // first key of leaf 0
  int key_low, key_high;      // keys that any row may see: [key_low, key_high); others are never read
  int clear_low, clear_high;  // keys that every row sees
  int leaves;                 // of the whole tile
  ChunkSize chunk;
  int first, last;  // this block's leaves: [first, last), whole chunks
  int start;        // where the tile begins in the line
  const std::int32_t* pages;

  // Leaves of the line, where a tile counts as whole chunks: then the chunks of equal sequences lie alike in it.
  FLASHPORT_DEVICE int span() const { return chunk.whole(leaves); }
  FLASHPORT_DEVICE bool whole() const { return first == 0 && last == leaves; }
  FLASHPORT_DEVICE int chunks_before(int leaf) const { return chunk.count(leaf); }
};

template <class Params>
FLASHPORT_DEVICE int query_length(const Params& p, int seq) {
  return p.cu_seqlens_q == nullptr ? p.max_q_len : p.cu_seqlens_q[seq + 1] - p.cu_seqlens_q[seq];
}

template <class Params>
FLASHPORT_DEVICE int lowest_key(const Params& p, int length, int q_len) {
  return p.window_left < 0 ? 0 : maximum(length - q_len - p.window_left, 0);
}

FLASHPORT_DEVICE int leaf_count(int key_begin, int key_end) {
  const int leaves = (key_end - key_begin + kLeafKeys - 1) >> kLeafShift;
  return leaves > 0 ? leaves : 1;
}

FLASHPORT_DEVICE ChunkSize tile_chunk_size(const DecodeParams& p, int leaves) {
  ChunkRule rule = p.chunk_rule;
  rule.finer = kFinerChunks && rule.finer;
  return chunk_size(leaves, rule);
}

// What a tile of a sequence takes of the line.
struct Span {
  ChunkSize chunk;
  int leaves;
};
template <class Params>
FLASHPORT_DEVICE Span sequence_span(const Params& p, int seq, int length) {
  const int low = p.window_left < 0 ? 0 : lowest_key(p, length, query_length(p, seq));
  const int leaves = leaf_count(low / kLeafKeys * kLeafKeys, length);
  const ChunkSize chunk = tile_chunk_size(p, leaves);
  return {chunk, chunk.whole(leaves)};
}

FLASHPORT_DEVICE ChunkSize broadcast_chunk(const Block& block, const ChunkSize& x, int lane) {
  const auto inverse = static_cast<unsigned>(block.wave_broadcast(static_cast<int>(x.inverse), lane));
  return {block.wave_broadcast(x.leaves, lane), inverse};
}
FLASHPORT_DEVICE Span broadcast_span(const Block& block, const Span& x, int lane) {
  return {broadcast_chunk(block, x.chunk, lane), block.wave_broadcast(x.leaves, lane)};
}

// Fills in what depends on the sequence alone, but for its chunks and pages.
template <class Params>
FLASHPORT_DEVICE Segment measure_sequence(const Params& p, int seq, int length) {
  Segment s;
  s.seq = seq;
  s.length = length;
  s.q_len = query_length(p, seq);
  s.q_begin = p.cu_seqlens_q == nullptr ? 0 : p.cu_seqlens_q[seq];
  s.pages = nullptr;
  s.key_low = lowest_key(p, s.length, s.q_len);
  s.key_high = s.length;
  const int first_position = s.length - s.q_len;
  s.clear_low = p.window_left < 0 ? 0 : maximum(s.length - 1 - p.window_left, 0);
  s.clear_high = minimum(length, first_position + p.clear_right);
  s.key_begin = s.key_low / kLeafKeys * kLeafKeys;
  s.leaves = leaf_count(s.key_begin, s.key_high);
  return s;
}
template <class Params>
FLASHPORT_DEVICE Segment open_sequence(const Params& p, int seq, int length) {
  Segment s = measure_sequence(p, seq, length);
  s.chunk = tile_chunk_size(p, s.leaves);
  s.pages = kv::page_list<Params::kPlain>(p.cache, seq);
  return s;
}

// How the line is cut, as this block sees it.
struct Line {
  int quota;      // leaves of a work range
  float inverse;  // 1 / quota
  int cut;        // DecodeParams::cuts
  int leaves;     // of one query tile of each sequence

  // The number of the work range that has leaf `at` of the line.
  FLASHPORT_DEVICE int range_of(int at) const { return divide(at, quota, inverse); }
};

// The block's work range, beginning in `segment`. end is exclusive; an idle block has first == last.
struct Range {
  Line line;
  int end;
  Segment segment;
};

// The sequences of the batch that a lane of a wave measures: so many on end, or what is left of them.
FLASHPORT_DEVICE int sequences_of_lane(const DecodeParams& p) {
  return static_cast<int>((static_cast<unsigned>(p.batch) + kWaveSize - 1) / kWaveSize);
}

// `one`: of the last sequence that lane 0 measures.
FLASHPORT_DEVICE Line cut_line(const DecodeParams& p, int leaves, unsigned blocks, const Span& one) {
  Line line;
  const int least_leaves = kHasTeams ? p.cuts[1].least_leaves : kLeastConcurrentLeaves;
  line.cut = static_cast<unsigned>(leaves) * p.cuts[0].rows >= static_cast<unsigned>(least_leaves) * blocks ? 1 : 0;
  const LineCut& cut = p.cuts[line.cut];
  // At least the shortest chunk: ranges without one would leave every other block idle, and with them whole
  // multiprocessors.
  const int shortest = p.batch == 1 ? one.chunk.leaves : 1 << p.chunk_rule.least_shift;
  const int share = divide(leaves * cut.rows + static_cast<int>(cut.ranges.value) - 1, cut.ranges);
  const bool alike = static_cast<unsigned>(one.leaves) * p.batch == static_cast<unsigned>(leaves);
  line.quota = maximum(rounded_quota(share, alike ? one.chunk : ChunkSize{}), shortest);
  line.leaves = leaves;
  line.inverse = reciprocal_approx(static_cast<float>(line.quota));
  return line;
}

// Where segments begin with turns of their own, leaves come in twos. If the batch divides the line, as it does where
// all sequences have one length, these or equal parts of them fall to blocks whole, where that costs little balance.
FLASHPORT_DEVICE Line cut_line(const SegmentsDecodeParams& p, int leaves, unsigned /*blocks*/, const Span& one) {
  Line line;
  line.cut = 0;  // the other one is alike, or teams help, and each block has a tile of its own
  const LineCut& cut = p.cuts[0];
  const int share = divide(leaves * cut.rows + static_cast<int>(cut.ranges.value) - 1, cut.ranges);
  const int shortest = p.batch == 1 ? one.chunk.leaves : 1 << p.chunk_rule.least_shift;
  line.quota = maximum(share + (share & 1), shortest);
  const int mean = divide(leaves, p.batch, reciprocal_approx(static_cast<float>(p.batch)));
  const int ranges = mean / line.quota;  // of a sequence
  if (ranges > 0 && mean * p.batch == leaves) {
    const int whole = (mean + ranges - 1) / ranges;
    if (whole - line.quota <= line.quota / 16) line.quota = whole + (whole & 1);
  }
  line.leaves = leaves;
  line.inverse = reciprocal_approx(static_cast<float>(line.quota));
  return line;
}

// The number of the block that has `leaf` of the tile of a segment of this block, where that leaf begins a chunk.
FLASHPORT_DEVICE int block_of(const DecodeParams& p, const Block& block, const Line& line, const Segment& s, int leaf) {
  const Divisor& concurrent = p.cuts[line.cut].concurrent;
  const int index = static_cast<int>(block.index());
  return index + (line.range_of(s.start + leaf) - divide(index, concurrent)) * static_cast<int>(concurrent.value);
}

// Leaves and chunks of a tile that begins at `start`: of those whose chunks begin before `end`.
FLASHPORT_DEVICE int leaves_until(const Segment& s, int start, int end) {
  return end - start >= s.leaves ? s.leaves : minimum(s.leaves, s.chunk.whole(maximum(end - start, 0)));
}
FLASHPORT_DEVICE int chunks_until(const Segment& s, int start, int end) {
  return s.chunk.count(minimum(maximum(end - start, 0), s.leaves));
}

FLASHPORT_DEVICE void set_tile(const DecodeParams& p, Segment& s, int tile) {
  s.kv_head = divide(tile, p.by_row_tiles);
  s.row_tile = tile - s.kv_head * p.row_tiles;
}

// But for the pages of its sequence. length_of(seq): the sequence's keys; with cu_seqlens_q the queries of sequences
// are read too, and nothing else of device memory is.
template <class Params, class Lengths>
FLASHPORT_DEVICE Range balanced_range(const Params& p, const Block& block, const Lengths& length_of) {
  // A lane's sequences: [from, to).
  const int per_lane = sequences_of_lane(p);
  const int from = block.lane() * per_lane;
  const int to = minimum(from + per_lane, p.batch);
  int mine = 0;
  int length = 0;
  Span span{};  // of the last one
  FLASHPORT_UNROLL(1)
  for (int seq = from; seq < to; ++seq) {
    length = length_of(seq);
    span = sequence_span(p, seq, length);
    mine += span.leaves;
  }
  int leaves;
  int start = block.wave_exclusive_scan(mine, leaves);

  const int index = static_cast<int>(block.index());
  Range range;
  Line& line = range.line;
  line = cut_line(p, leaves, static_cast<unsigned>(block.count()), broadcast_span(block, span, 0));
  const LineCut& cut = p.cuts[line.cut];
  const auto ranges = static_cast<int>(cut.ranges.value);
  const int number = divide(index, cut.concurrent);
  const int begin = line.quota * minimum(number, ranges);
  range.end = begin + line.quota;
  range.segment = {};
  if (number >= ranges || begin >= leaves * cut.rows) return range;  // idle

  // The lane whose sequences hold the beginning, then the sequence among as many as the wave has lanes.
  int weight = mine;
  // Unsigned, because a host's model of a wave asks it also of lanes that have not been told the others' sums yet.
  const auto on_line = [&](int count) { return static_cast<int>(static_cast<unsigned>(count) * cut.rows); };
  const auto find = [&] {
    const int finder = block.wave_find(begin >= on_line(start) && begin < on_line(start + weight));
    start = block.wave_broadcast(start, finder);
    return finder;
  };
  int finder = find();
  int seq = finder * per_lane;
  FLASHPORT_UNROLL(1)
  for (int end = seq + per_lane; per_lane > 1 && seq < end; seq += kWaveSize) {
    const int its_seq = seq + block.lane();
    length = its_seq < p.batch ? length_of(its_seq) : 0;
    span = its_seq < p.batch ? sequence_span(p, its_seq, length) : Span{};
    weight = span.leaves;
    const int inside = block.wave_exclusive_scan(weight, leaves);
    if (begin < on_line(start + leaves)) {
      start += inside;
      finder = find();
      break;
    }
    start += leaves;
  }
  if (per_lane > 1) seq += finder;
  Segment& s = range.segment;
  s = measure_sequence(p, seq, block.wave_broadcast(length, finder));
  s.chunk = broadcast_chunk(block, span.chunk, finder);
  int row = divide(begin - on_line(start), s.span(), reciprocal_approx(static_cast<float>(s.span())));
  s.start = on_line(start) + row * s.span();
  s.first = leaves_until(s, s.start, begin);
  if (s.first == s.leaves) {  // the range begins after the start of the tile's last chunk
    s.start += s.span();
    s.first = 0;
    if (++row == cut.rows) {
      row = 0;
      if (++seq == p.batch) {
        s.last = 0;
        return range;
      }
      const int next_start = s.start;
      s = measure_sequence(p, seq, length_of(seq));
      s.chunk = tile_chunk_size(p, s.leaves);
      s.start = next_start;
      s.first = 0;
    }
  }
  s.last = maximum(s.first, leaves_until(s, s.start, range.end));
  const auto concurrent = static_cast<int>(cut.concurrent.value);
  set_tile(p, s, row * concurrent + index - number * concurrent);
  return range;
}

// One chunk of one tile: chunk is the fastest index, then the tile, then the sequence.
template <class Params>
FLASHPORT_DEVICE Range chunk_range(const Params& p, const Block& block) {
  const int tiles = p.num_kv_heads * p.row_tiles;
  const int index = static_cast<int>(block.index());
  const int chunk = index % p.num_chunks;
  const int rest = index / p.num_chunks;
  Range range;
  const int seq = rest / tiles;
  if (seq >= p.batch) return {};  // beyond the grid
  range.segment = open_sequence(p, seq, key_count(p, seq));
  Segment& s = range.segment;
  set_tile(p, s, rest % tiles);
  std::int64_t keys = p.chunk_keys;
  if (keys == 0) keys = static_cast<std::int64_t>((s.leaves + p.num_chunks - 1) / p.num_chunks) * kLeafKeys;
  const std::int64_t begin =
      minimum(static_cast<std::int64_t>(s.key_begin) + chunk * keys, static_cast<std::int64_t>(s.key_high));
  s.key_begin = static_cast<int>(begin);
  s.key_low = maximum(s.key_low, s.key_begin);
  s.key_high = static_cast<int>(minimum(begin + keys, static_cast<std::int64_t>(s.key_high)));
  s.leaves = leaf_count(s.key_begin, s.key_high);
  s.chunk = tile_chunk_size(p, s.leaves);
  s.first = 0;
  s.last = s.key_begin < s.key_high || p.write_empty_chunks ? s.leaves : 0;
  s.start = 0;
  range.end = s.leaves;
  range.line = {kLongestLine, 1.0f / kLongestLine, 0, kLongestLine};
  return range;
}

template <class Params>
FLASHPORT_DEVICE Range block_range(const Params& p, const Block& block) {
  if (p.num_chunks > 0) return block.uniform(chunk_range(p, block));
  Range range = balanced_range(p, block, [&](int seq) { return key_count(p, seq); });
  range.segment.pages = kv::page_list(p.cache, range.segment.seq);
  return block.uniform(range);
}

// Walks through a block's range leaf by leaf, tile by tile. Place: Segment or, where registers are few, Segment&, of
// which each wave has one in shared memory.
template <class Place>
struct LeafCursorAt {
  Place segment;
  int leaf;
  Line line;
  int end;

  FLASHPORT_DEVICE explicit LeafCursorAt(const Range& range)
      : segment(range.segment), leaf(range.segment.first), line(range.line), end(range.end) {}
  FLASHPORT_DEVICE LeafCursorAt(const Range& range, Segment& place)
      : segment(place), leaf(range.segment.first), line(range.line), end(range.end) {
    segment = range.segment;
  }

  FLASHPORT_DEVICE bool done() const { return leaf >= segment.last; }
  FLASHPORT_DEVICE bool at_segment_start() const { return leaf == segment.first; }
  FLASHPORT_DEVICE int key() const { return segment.key_begin + leaf * kLeafKeys; }

  template <class Params>
  FLASHPORT_DEVICE void next(const Params& p, int leaves = 1) {
    leaf += leaves;
    if (leaf < segment.last) return;
    const int next_start = segment.start + segment.span();
    if (next_start >= end) return;
    const int tiles = p.num_kv_heads * p.row_tiles;
    int tile = segment.kv_head * p.row_tiles + segment.row_tile + static_cast<int>(p.cuts[line.cut].concurrent.value);
    const int seq = segment.seq + 1;
    if (tile >= tiles && seq == p.batch) return;
    if constexpr (std::is_reference_v<Place>) sync_wave();  // all lanes have read it
    if (tile >= tiles) {
      tile -= tiles;
      segment = open_sequence(p, seq, key_count(p, seq));
    }
    set_tile(p, segment, tile);
    segment.start = next_start;
    segment.first = 0;
    segment.last = leaves_until(segment, next_start, end);
    leaf = 0;
  }
};
using LeafCursor = LeafCursorAt<Segment>;

}  // namespace flashport::FLASHPORT_TARGET::decode
