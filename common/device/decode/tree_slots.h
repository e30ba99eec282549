// The subtrees of a tile's tree, and the slots in which a parent's children are left (tree_layout.h).
#pragma once

#include "common/device/decode/schedule.h"

namespace flashport::FLASHPORT_TARGET::decode {

// A subtree of `level`: leaves [first, end), its children of 1 << child_shift leaves.
struct Subtree {
  int index;
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
  return {index, first, end, child_shift, shift_up(end - first, child_shift), first >= s.first && end <= s.last};
}

// Numbers of the first of a parent's slots, and a slot.
class TreeSlots {
 public:
  FLASHPORT_DEVICE TreeSlots(const DecodeParams& p, const Block& block) : p_(p), block_(block) {}

  FLASHPORT_DEVICE int this_block() const { return recompute(static_cast<int>(block_.index())); }
  FLASHPORT_DEVICE int shared(int owner, int level) const { return tree_shared_slots(owner, params().levels, level); }
  FLASHPORT_DEVICE std::int64_t own(int level) const {
    const DecodeParams& p = params();
    return p.num_chunks > 0 ? chunk_own_slots(block_.index(), p.levels, level)
                            : tree_own_slots(this_block(), p.levels, level);
  }
  FLASHPORT_DEVICE float* at(std::int64_t number) const { return params().slots + number * params().slot_floats; }

  // What few leaves need is read again where it is needed.
  FLASHPORT_DEVICE const DecodeParams& params() const { return reread(p_); }

 private:
  const DecodeParams& p_;
  const Block& block_;
};

}  // namespace flashport::FLASHPORT_TARGET::decode
