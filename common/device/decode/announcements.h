// What a block announces behind its last leaf: its children of the parents that it shares with other blocks, at most
// two a level and tile, at the two ends of its range. All of it follows from the range alone, so that it is worked out
// a lane an announcement: of the first tile while its first keys are on their way, of the last one, if that is another,
// on targets with producer waves by those while the last leaf is still being worked on.
#pragma once

#include "common/device/decode/tree_slots.h"

namespace flashport::FLASHPORT_TARGET::decode {

struct alignas(16) Announcement {
  int counter;
  int slots;     // of the children: the number of the first
  int parent;    // the slot where the subtree goes, when it is done; -1: it is the root
  int children;  // 0: no such subtree, or not shared
  int arriving;  // children that this block has finished alone
  int folded;    // children that the owner left folded, in slot 0
  int one;       // both ends of the range lie in this subtree
  int unused;    // 32 bytes, all of them words that Block::uniform() may take
};

inline constexpr int kMostLevels = tree_levels(0x7fffffff);

struct RangeEnds {
  Announcement at[2][kMostLevels][2];  // of the range's first tile and its last, at each level, at each end
  Segment segments[2];
  int levels[2];  // that are walked; 0: nothing of the tile is shared, or it is the first one again
};

// Who owns what is shared, under the cut of the line: the block of this tile that has a subtree's first leaf.
struct Owners {
  const DecodeParams& p;
  const Line& line;
  const TreeSlots& slots;

  FLASHPORT_DEVICE int block_of(int stretch) const {
    const Divisor& group = p.cuts[line.cut].group;
    const int index = slots.this_block();
    return index + (stretch - divide(index, group)) * static_cast<int>(group.value);
  }
  FLASHPORT_DEVICE int shared_slots(const Segment& s, int level, int first_leaf) const {
    return slots.shared(block_of(stretch_of(p, line, s, first_leaf)), level);
  }
};

FLASHPORT_DEVICE Announcement announcement(const Owners& owners, const Segment& s, int level, int end,
                                           bool keeps_parent) {
  const int first_index = s.first >> shift_of(level);
  const int last_index = (s.last - 1) >> shift_of(level);
  Announcement a{};
  a.one = first_index == last_index;
  const Subtree tree = subtree(s, level, end == 0 ? first_index : last_index);
  if (tree.own || (end == 1 && a.one)) return a;
  const int from = shift_up(maximum(tree.first, s.first), tree.child_shift);
  const int until = minimum(tree.end, s.last);
  const int to = until == s.leaves ? shift_up(until, tree.child_shift) : until >> tree.child_shift;
  a.arriving = maximum(to - from, 0);
  a.children = tree.children;
  const int stretch = stretch_of(owners.p, owners.line, s, tree.first);
  const int owner = owners.block_of(stretch);
  a.counter = tree_counter(owner, owners.p.levels, level);
  a.slots = owners.slots.shared(owner, level);
  // Of the lowest levels the owner leaves what it has from the first child on as one state.
  const int owners_end = leaves_before(stretch_begin(owners.p, owners.line, stretch + 1) - s.start, owners.line.unit);
  a.folded = level <= (keeps_parent ? 2 : 1) ? maximum((owners_end - tree.first) >> tree.child_shift, 1) : 1;
  a.parent = -1;
  if (span_of(level) < s.leaves) {
    const Subtree parent = subtree(s, level + 1, tree.index / kFanOut);
    a.parent = owners.shared_slots(s, level + 1, parent.first) + tree.index % kFanOut;
  }
  return a;
}

// Of the first tile of the range (0) or the last (1), by the lanes of one wave.
FLASHPORT_DEVICE void plan_announcements(const DecodeParams& p, const Block& block, const Line& line, bool keeps_parent,
                                         RangeEnds& ends, int tile, const Segment& s) {
  const TreeSlots slots(p, block);
  const Owners owners{p, line, slots};
  if (block.lane() == 0) {
    int levels = s.first == 0 && s.last == s.leaves ? 0 : 1;
    while (levels > 0 && span_of(levels) < s.leaves) ++levels;
    ends.levels[tile] = levels;
    ends.segments[tile] = s;
  }
  if (s.first == 0 && s.last == s.leaves) return;
  for (int i = block.lane(); i < 2 * p.levels; i += kWaveSize) {
    const int end = i & 1;
    const int level = 1 + (i >> 1);
    if (level > 1 && span_of(level - 1) >= s.leaves) break;
    ends.at[tile][level - 1][end] = announcement(owners, s, level, end, keeps_parent);
  }
}

// The last tile of the range, if it is not the first again, which `ends` has.
FLASHPORT_DEVICE void plan_last_tile(const DecodeParams& p, const Block& block, const Line& line, bool keeps_parent,
                                     RangeEnds& ends, int first_start, const Segment& s) {
  if (s.start != first_start) {
    plan_announcements(p, block, line, keeps_parent, ends, 1, s);
  } else if (block.lane() == 0) {
    ends.levels[1] = 0;
  }
}

}  // namespace flashport::FLASHPORT_TARGET::decode
