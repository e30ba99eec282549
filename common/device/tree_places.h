// Where the partial results of a tile's tree (tree_layout.h) lie under the schedule's cut of the line: which block owns
// what is shared, and in which slots a parent's children are left.
#pragma once

#include "common/device/schedule.h"

namespace flashport::FLASHPORT_TARGET {

// A subtree of `level`: leaves [first, end), its children of 1 << child_shift leaves.
struct Subtree {
  int level, index;
  int first, end;
  int child_shift, children;
  bool own;  // this block has all of it
};

// A subtree of `level` has 1 << shift_of(level) leaves, or what is left of the tile. Shifts, because divisions by what
// only the run knows are long, and few leaves stand behind a loop to hide them.
FLASHPORT_DEVICE int shift_of(int level) { return 4 * level; }
FLASHPORT_DEVICE int span_of(int level) { return 1 << shift_of(level); }
static_assert(kFanOut == 16);

FLASHPORT_DEVICE int shift_up(int leaves, int shift) { return (leaves + (1 << shift) - 1) >> shift; }
FLASHPORT_DEVICE Subtree subtree(const Segment& s, int level, int index) {
  const int first = index << shift_of(level);
  const int end = minimum(first + span_of(level), s.leaves);
  const int child_shift = shift_of(level - 1);
  return {level, index, first, end, child_shift, shift_up(end - first, child_shift), first >= s.first && end <= s.last};
}

class TreePlaces {
 public:
  FLASHPORT_DEVICE TreePlaces(const DecodeParams& p, const Block& block, const Line& line)
      : p_(p), block_(block), line_(line) {}

  FLASHPORT_DEVICE int this_block() const { return static_cast<int>(block_.index()); }
  // The stretch whose blocks have `leaf`, and the one of this tile among them.
  FLASHPORT_DEVICE int stretch_of_leaf(const Segment& s, int leaf) const {
    return stretch_of(params(), line_, s, leaf);
  }
  FLASHPORT_DEVICE int block_of(int stretch) const {
    const Divisor& group = params().cuts[line_.cut].group;
    return this_block() + (stretch - divide(this_block(), group)) * static_cast<int>(group.value);
  }
  FLASHPORT_DEVICE int owner_of(const Segment& s, int leaf) const { return block_of(stretch_of_leaf(s, leaf)); }
  // Leaves of the tile before the end of a stretch, if it has so many.
  FLASHPORT_DEVICE int leaves_until_end(const Segment& s, int stretch) const {
    return leaves_before(stretch_begin(params(), line_, stretch + 1) - s.start, line_.unit);
  }

  // Numbers of the first of a parent's slots.
  FLASHPORT_DEVICE int shared_slots(int owner, int level) const {
    return tree_shared_slots(owner, params().levels, level);
  }
  FLASHPORT_DEVICE std::int64_t own_slots(int level) const {
    const DecodeParams& p = params();
    return p.num_chunks > 0 ? chunk_own_slots(block_.index(), p.levels, level)
                            : tree_own_slots(this_block(), p.levels, level);
  }
  // Where the finished subtree `index` of `level` goes: among the children of its parent.
  FLASHPORT_DEVICE std::int64_t slot_of(const Segment& s, int level, int index) const {
    const Subtree parent = subtree(s, level + 1, index / kFanOut);
    const std::int64_t slots = parent.own ? own_slots(level + 1) : shared_slots(owner_of(s, parent.first), level + 1);
    return slots + index % kFanOut;
  }
  FLASHPORT_DEVICE float* slot(std::int64_t number) const { return params().slots + number * params().slot_floats; }

  // What few leaves need is read again where it is needed.
  FLASHPORT_DEVICE const DecodeParams& params() const { return reread(p_); }

 private:
  const DecodeParams& p_;
  const Block& block_;
  const Line line_;
};

}  // namespace flashport::FLASHPORT_TARGET
