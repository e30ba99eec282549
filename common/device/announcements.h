// What a block announces behind its last leaf: its children of the parents that it shares with other blocks, at most two
// a level and tile, at the two ends of its range. All of it follows from the range alone, so that it is worked out a
// lane an announcement, on targets with producer waves by those while the last leaf is still being worked on.
#pragma once

#include "common/device/tree_places.h"

namespace flashport::FLASHPORT_TARGET {

struct alignas(16) Announcement {
  int counter;
  int slots;     // of the children: the number of the first
  int parent;    // the slot where the subtree goes, when it is done; -1: it is the root
  int children;  // 0: no such subtree, or not shared
  int arriving;  // children that this block has finished alone
  int folded;    // children that the owner left folded, in slot 0
  int one;       // both ends of the range lie in this subtree
  int unused;
};

inline constexpr int kMostLevels = tree_levels(0x7fffffff);

struct RangeEnds {
  Announcement at[2][kMostLevels][2];  // of the range's first tile and its last, at each level, at each end
  Segment segments[2];
  int levels[2];  // that are walked; 0: nothing of the tile is shared, or it is the first one again
};

FLASHPORT_DEVICE Announcement announcement(const DecodeParams& p, const TreePlaces& places, const Segment& s, int level,
                                           int end, bool keeps_parent) {
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
  const int stretch = places.stretch_of_leaf(s, tree.first);
  const int owner = places.block_of(stretch);
  a.counter = tree_counter(owner, p.levels, level);
  a.slots = places.shared_slots(owner, level);
  const bool folds = level <= (keeps_parent ? 2 : 1);
  const int owners = folds ? (places.leaves_until_end(s, stretch) - tree.first) >> tree.child_shift : 1;
  a.folded = maximum(owners, 1);
  a.parent = span_of(level) >= s.leaves ? -1 : static_cast<int>(places.slot_of(s, level, tree.index));
  return a;
}

// By the lanes of one wave; the two segments lie in `ends`.
FLASHPORT_DEVICE void plan_announcements(const DecodeParams& p, const Block& block, const Line& line, bool keeps_parent,
                                         RangeEnds& ends) {
  const TreePlaces places(p, block, line);
  for (int i = block.lane(); i < 4 * p.levels; i += kWaveSize) {
    const int tile = i & 1;
    const int end = i >> 1 & 1;
    const int level = 1 + (i >> 2);
    const Segment& s = ends.segments[tile];
    const bool shared = !(s.first == 0 && s.last == s.leaves) && !(tile == 1 && s.start == ends.segments[0].start);
    const bool exists = shared && (level == 1 || span_of(level - 1) < s.leaves);
    if (exists) ends.at[tile][level - 1][end] = announcement(p, places, s, level, end, keeps_parent);
    if (level == 1 && end == 0) {
      int levels = 1;
      while (span_of(levels) < s.leaves) ++levels;
      ends.levels[tile] = shared ? levels : 0;
    }
  }
}

}  // namespace flashport::FLASHPORT_TARGET
