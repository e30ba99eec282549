// Who works on what. The query tiles of a sequence (kv head, then rows of its packed group) form groups that walk
// through the keys side by side, a block for each tile: heads that share pages read them together, from memory that is
// near. The work is a line of leaves (64 keys of one group): sequence by sequence, group by group, leaf by leaf, cut
// into equal stretches: stretch i of n holds [units * i / n, units * (i + 1) / n), and the `group` blocks from
// i * group on work on it. The line is never stored: each wave scans the leaf counts of the batch and finds the
// block's beginning, without a barrier and in 32 bits (tree_layout.h has the longest line), because few leaves may
// stand behind it. A sequence without keys counts one leaf, so that someone writes its output.
// With fixed chunks (stage 1, num_splits) a block is one chunk of one tile instead.
#pragma once

#include "common/device/core/divide.h"
#include "common/device/decode/params.h"
#include "common/device/decode/tree_layout.h"
#include "common/device/kv/paged_kv.h"

namespace flashport::FLASHPORT_TARGET::decode {

// A query tile's part of the line that this block works on.
struct Segment {
  int seq;
  int kv_head, row_tile;      // the query tile: rows of this head's packed group
  int length;                 // keys of the sequence
  int q_len, q_begin;         // query tokens of the sequence; its first row in ragged tensors
  int key_begin;              // first key of leaf 0
  int key_low, key_high;      // keys that any row may see: [key_low, key_high); others are never read
  int clear_low, clear_high;  // keys that every row sees
  int leaves;                 // of the whole tile
  int first, last;            // this block's leaves: [first, last)
  int start;                  // where the tile begins in the line
  const std::int32_t* pages;
};

FLASHPORT_DEVICE int query_length(const DecodeParams& p, int seq) {
  return p.cu_seqlens_q == nullptr ? p.max_q_len : p.cu_seqlens_q[seq + 1] - p.cu_seqlens_q[seq];
}

FLASHPORT_DEVICE int lowest_key(const DecodeParams& p, int length, int q_len) {
  return p.window_left < 0 ? 0 : maximum(length - q_len - p.window_left, 0);
}

FLASHPORT_DEVICE int leaf_count(int key_begin, int key_end) {
  const int leaves = (key_end - key_begin + kLeafKeys - 1) / kLeafKeys;
  return leaves > 0 ? leaves : 1;
}

FLASHPORT_DEVICE int sequence_leaves(const DecodeParams& p, int seq, int length) {
  const int low = p.window_left < 0 ? 0 : lowest_key(p, length, query_length(p, seq));
  return leaf_count(low / kLeafKeys * kLeafKeys, length);
}

// Fills in what depends on the sequence alone.
FLASHPORT_DEVICE Segment open_sequence(const DecodeParams& p, int seq, int length) {
  Segment s;
  s.seq = seq;
  s.length = length;
  s.q_len = query_length(p, seq);
  s.q_begin = p.cu_seqlens_q == nullptr ? 0 : p.cu_seqlens_q[seq];
  s.pages = kv::page_list(p.cache, seq);
  s.key_low = lowest_key(p, s.length, s.q_len);
  s.key_high = s.length;
  const int first_position = s.length - s.q_len;
  s.clear_low = p.window_left < 0 ? 0 : maximum(s.length - 1 - p.window_left, 0);
  s.clear_high = p.tree_mask != nullptr ? first_position : first_position + 1;
  s.key_begin = s.key_low / kLeafKeys * kLeafKeys;
  s.leaves = leaf_count(s.key_begin, s.key_high);
  return s;
}

// The line is counted in units of 1 leaf or, where that costs no more than 1/32 of a stretch's leaves in balance, of
// one node: then no node is cut, and far fewer partial results meet. Counted in leaves, a tile begins with its opening
// (kOpeningLeaves); who has only that of a tile has nothing of it.
FLASHPORT_DEVICE int units_of(int leaves, int unit) {
  return unit == 1 ? leaves + kOpeningLeaves : (leaves + kFanOut - 1) / kFanOut;
}
FLASHPORT_DEVICE int unit_of_leaf(int leaf, int unit) { return unit == 1 ? leaf + kOpeningLeaves : leaf / kFanOut; }
// Leaves in the first `units` of a tile, if it has so many.
FLASHPORT_DEVICE int leaves_before(int units, int unit) {
  return unit == 1 ? maximum(units - kOpeningLeaves, 0) : minimum(units, kLongestLine / kFanOut) * kFanOut;
}

// How the line is cut, as this block sees it.
struct Line {
  int unit;  // leaves
  int cut;   // DecodeParams::cuts
  int share;
  unsigned rest;  // units / stretches, and what remains of it
};

// The block's stretch of the line, beginning in `segment`. end is exclusive; an idle block has first == last.
struct Range {
  Line line;
  int end;
  Segment segment;
};

// Where stretch `stretch` of n begins: units * stretch / n.
FLASHPORT_DEVICE int stretch_begin(const DecodeParams& p, const Line& line, int stretch) {
  const unsigned rest = line.rest * static_cast<unsigned>(stretch);  // both are below kCounterCapacity
  return line.share * stretch + divide(static_cast<int>(rest), p.cuts[line.cut].stretches);
}

// Stretches a unit, roughly.
FLASHPORT_DEVICE float inverse_share(const DecodeParams& p, const Line& line) {
  const auto stretches = static_cast<float>(p.cuts[line.cut].stretches.value);
  return stretches * reciprocal_approx(static_cast<float>(line.share) * stretches + static_cast<float>(line.rest));
}

// The stretch that holds `leaf` of a segment: the last one that begins at its unit or before, which is to say before
// (unit + 1) * n / units. As a float that is wrong by far less than 1, so its whole part by one at most.
FLASHPORT_DEVICE int stretch_of(const DecodeParams& p, const Line& line, const Segment& s, int leaf) {
  const int unit = s.start + unit_of_leaf(leaf, line.unit);
  const int last = static_cast<int>(p.cuts[line.cut].stretches.value) - 1;
  const int stretch = minimum(static_cast<int>((static_cast<float>(unit) + 1.0f) * inverse_share(p, line)), last);
  if (stretch_begin(p, line, stretch) > unit) return stretch - 1;
  return stretch < last && stretch_begin(p, line, stretch + 1) <= unit ? stretch + 1 : stretch;
}

FLASHPORT_DEVICE void set_tile(const DecodeParams& p, Segment& s, int tile) {
  s.kv_head = divide(tile, p.by_row_tiles);
  s.row_tile = tile - s.kv_head * p.row_tiles;
}

FLASHPORT_DEVICE Range balanced_range(const DecodeParams& p, const Block& block) {
  // A lane's sequences: [from, to).
  const int share = (p.batch + kWaveSize - 1) / kWaveSize;
  const int from = block.lane() * share;
  const int to = minimum(from + share, p.batch);
  // Leaves in the low half and nodes in the high one: one scan counts both.
  std::int64_t mine = 0;
  int length = 0;
  for (int seq = from; seq < to; ++seq) {
    length = kv::sequence_length(p.cache, seq);
    const int leaves = sequence_leaves(p, seq, length);
    mine += (static_cast<std::int64_t>(units_of(leaves, kFanOut)) << 32) + leaves;
  }
  std::int64_t both;
  const std::int64_t before = block.wave_exclusive_scan(mine, both);

  // Side by side only where every block gets some leaves: else these spread better.
  const auto leaves = static_cast<int>(both);
  const auto nodes = static_cast<int>(both >> 32);
  const int index = static_cast<int>(block.index());
  Range range;
  Line& line = range.line;
  line.cut = std::int64_t{leaves} * p.cuts[0].groups >= 8 * block.count() ? 1 : 0;
  const LineCut& cut = p.cuts[line.cut];
  const int groups = cut.groups;
  const auto stretches = static_cast<int>(cut.stretches.value);
  const int place = divide(index, cut.group);
  const int stretch = minimum(place, stretches);  // the last few: idle
  const int node_units = nodes * groups;
  const std::int64_t all_leaves = std::int64_t{leaves} * groups;
  const std::int64_t leaf_units = all_leaves + std::int64_t{kOpeningLeaves} * p.batch * groups;
  const int by_node = divide(node_units + stretches - 1, cut.stretches);  // of the longest stretch
  const bool whole_nodes =
      std::int64_t{by_node} * kFanOut * stretches <= all_leaves + all_leaves / 32 || leaf_units > kLongestLine;
  line.unit = whole_nodes ? kFanOut : 1;
  const int units = whole_nodes ? node_units : static_cast<int>(leaf_units);
  line.share = divide(units, cut.stretches);
  line.rest = static_cast<unsigned>(units - line.share * stretches);
  const int begin = stretch_begin(p, line, stretch);
  range.end = stretch < stretches ? stretch_begin(p, line, stretch + 1) : begin;
  if (begin >= range.end) {
    range.segment = {};
    return range;
  }

  // The lane whose sequences hold the beginning, then the sequence among as many as the wave has lanes.
  const int openings = kOpeningLeaves * (to - from);
  int start = whole_nodes ? static_cast<int>(before >> 32) : static_cast<int>(before) + kOpeningLeaves * from;
  int weight = whole_nodes ? static_cast<int>(mine >> 32) : static_cast<int>(mine) + openings;
  // Unsigned, because a host's model of a wave asks it also of lanes that have not been told the others' sums yet.
  const auto line_units = [&](int units) { return static_cast<int>(static_cast<unsigned>(units) * groups); };
  const auto find = [&] {
    const int finder = block.wave_find(begin >= line_units(start) && begin < line_units(start + weight));
    start = block.wave_broadcast(start, finder);
    return finder;
  };
  int finder = find();
  int seq = finder * share;
  for (int end = seq + share; share > 1 && seq < end; seq += kWaveSize) {
    const int its_seq = seq + block.lane();
    length = its_seq < p.batch ? kv::sequence_length(p.cache, its_seq) : 0;
    weight = its_seq < p.batch ? units_of(sequence_leaves(p, its_seq, length), line.unit) : 0;
    std::int64_t all;
    const auto inside = static_cast<int>(block.wave_exclusive_scan(weight, all));
    if (begin < line_units(start + static_cast<int>(all))) {
      start += inside;
      finder = find();
      break;
    }
    start += static_cast<int>(all);
  }
  if (share > 1) seq += finder;
  start = line_units(start);
  range.segment = open_sequence(p, seq, block.wave_broadcast(length, finder));
  Segment& s = range.segment;
  const int tile_units = units_of(s.leaves, line.unit);
  const int tile_row = (begin - start) / tile_units;
  const int lane = index - place * static_cast<int>(cut.group.value);  // among those side by side
  set_tile(p, s, tile_row * static_cast<int>(cut.group.value) + lane);
  s.start = start + tile_row * tile_units;
  s.first = leaves_before(begin - s.start, line.unit);
  s.last = minimum(s.leaves, leaves_before(range.end - s.start, line.unit));
  return range;
}

// One chunk of one tile: chunk is the fastest index, then the tile, then the sequence.
FLASHPORT_DEVICE Range chunk_range(const DecodeParams& p, const Block& block) {
  const int tiles = p.num_kv_heads * p.row_tiles;
  const int index = static_cast<int>(block.index());
  const int chunk = index % p.num_chunks;
  const int rest = index / p.num_chunks;
  Range range;
  const int seq = rest / tiles;
  if (seq >= p.batch) return {};  // beyond the grid
  range.segment = open_sequence(p, seq, kv::sequence_length(p.cache, seq));
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
  s.first = 0;
  s.last = s.key_begin < s.key_high || p.write_empty_chunks ? s.leaves : 0;
  s.start = 0;
  range.end = units_of(s.leaves, kFanOut);
  range.line = {};
  range.line.unit = kFanOut;  // no cut
  return range;
}

FLASHPORT_DEVICE Range block_range(const DecodeParams& p, const Block& block) {
  return block.uniform(p.num_chunks > 0 ? chunk_range(p, block) : balanced_range(p, block));
}

// Walks a block's range leaf by leaf, tile by tile.
struct LeafCursor {
  Segment segment;
  int leaf;
  int unit, cut;
  int end;

  FLASHPORT_DEVICE explicit LeafCursor(const Range& range)
      : segment(range.segment), leaf(range.segment.first), unit(range.line.unit), cut(range.line.cut), end(range.end) {}

  FLASHPORT_DEVICE bool done() const { return leaf >= segment.last; }
  FLASHPORT_DEVICE bool at_segment_start() const { return leaf == segment.first; }
  FLASHPORT_DEVICE int key() const { return segment.key_begin + leaf * kLeafKeys; }

  FLASHPORT_DEVICE void next(const DecodeParams& p) {
    if (++leaf < segment.last) return;
    const int next_start = segment.start + units_of(segment.leaves, unit);
    const int leaves_due = leaves_before(end - next_start, unit);
    if (leaves_due <= 0) return;
    const int tiles = p.num_kv_heads * p.row_tiles;
    int tile = segment.kv_head * p.row_tiles + segment.row_tile + static_cast<int>(p.cuts[cut].group.value);
    if (tile >= tiles) {
      tile -= tiles;
      const int seq = segment.seq + 1;
      segment = open_sequence(p, seq, kv::sequence_length(p.cache, seq));
    }
    set_tile(p, segment, tile);
    segment.start = next_start;
    segment.first = 0;
    segment.last = minimum(segment.leaves, leaves_due);
    leaf = 0;
  }
};

}  // namespace flashport::FLASHPORT_TARGET::decode
