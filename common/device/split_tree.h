// The fixed tree under the free schedule. A leaf is 64 keys; a node folds kFanOut leaves left to right; 16-ary levels
// above it fold their children left to right, up to one root a query tile. A tile's tree depends on its own leaves
// alone, and every fold is merge() in child order, so any cut of the line into blocks gives the same bits.
//
// A block folds the node that it holds from its first leaf on in registers. All else meets in the workspace: each parent
// has kFanOut child slots there. A parent whose leaves lie in several blocks belongs to the block of its first leaf (at
// most one a level and block) and has a counter; who completes the last child folds all of them and goes on with the
// parent. Nobody waits. Counters come back to zero by themselves, so a launch can be replayed.
#pragma once

#include "common/device/online_softmax.h"
#include "common/device/output.h"
#include "common/device/schedule.h"

namespace flashport::FLASHPORT_TARGET {

template <class Tiles>
class SplitTree {
 public:
  using State = SoftmaxState<Tiles>;

  FLASHPORT_DEVICE SplitTree(const DecodeParams& p, const Block& block, const Range& range)
      : p_(p), block_(block), total_(range.total), blocks_(range.blocks) {}

  // Adds the state of leaf `now`; writes the tile's output where that completes its root.
  FLASHPORT_DEVICE void add_leaf(const Tiles& tiles, const LeafCursor& now, const State& leaf_state) {
    const Segment& s = now.segment;
    const int leaf = now.leaf;
    const int node_first = leaf - leaf % kFanOut;
    const int node_end = minimum(node_first + kFanOut, s.leaves);
    const bool node_ends = leaf == node_end - 1;
    const bool range_ends = leaf == s.last - 1;
    std::int64_t owner = block_.index();
    int arriving;
    if (node_first >= s.first) {
      if (leaf == node_first) {
        node_ = leaf_state;
      } else {
        merge(tiles, node_, leaf_state);
      }
      if (!node_ends && !range_ends) return;
      if (node_ends && s.leaves <= kFanOut) {
        write_output(tiles, p_, s, block_, node_);
        return;
      }
      if (node_ends) {
        const int node = leaf / kFanOut;
        store_state(tiles, slots_of(s, parent_of(s, 1, node)) + node % kFanOut * p_.slot_floats, node_);
        climb(tiles, s, 1, node);
        return;
      }
      // The owner's leaves of a cut node come folded, in slot 0.
      store_state(tiles, shared_slots(owner, 1), node_);
      arriving = leaf - node_first + 1;
    } else {
      owner = owner_of(total_, s.start + node_first, blocks_);
      store_state(tiles, shared_slots(owner, 1) + (leaf - node_first) * p_.slot_floats, leaf_state);
      if (!node_ends && !range_ends) return;
      arriving = leaf - maximum(node_first, s.first) + 1;
    }
    if (!block_.arrive(p_.counters + tree_counter(owner, p_.levels, 1), arriving, node_end - node_first)) return;
    const int folded = static_cast<int>(range_begin(total_, owner + 1, blocks_) - s.start) - node_first;
    if (fold(tiles, s, 1, leaf / kFanOut, shared_slots(owner, 1), folded, node_end - node_first)) return;
    climb(tiles, s, 1, leaf / kFanOut);
  }

 private:
  // The parent of a subtree: its leaves and, if other blocks have some of them too, the block that owns it.
  struct Parent {
    int level, index;
    int children;
    std::int64_t owner;  // -1: this block alone
  };

  FLASHPORT_DEVICE static int span_of(int level) { return 1 << (4 * level); }
  static_assert(kFanOut == 16);

  FLASHPORT_DEVICE Parent parent_of(const Segment& s, int level, int index) const {
    const int span = span_of(level);
    const int first = index / kFanOut * span * kFanOut;
    const int end = minimum(first + span * kFanOut, s.leaves);
    const bool own = first >= s.first && end <= s.last;
    return {level + 1, index / kFanOut, (end - first + span - 1) / span,
            own ? -1 : owner_of(total_, s.start + first, blocks_)};
  }

  // Subtree `index` of `level` lies in its slot. Completes the parents that are complete with it.
  FLASHPORT_DEVICE void climb(const Tiles& tiles, const Segment& s, int level, int index) {
    for (;;) {
      const Parent parent = parent_of(s, level, index);
      const int child = index % kFanOut;
      if (parent.owner < 0) {
        if (child != parent.children - 1) return;
        block_.sync();
      } else {
        ++pending_;
        // Children that are this block's alone are announced together, with the last of them.
        const int first = index * span_of(level);
        const int end = minimum(first + span_of(level), s.leaves);
        const int sibling_end = minimum(end + span_of(level), s.leaves);
        if (first >= s.first && end <= s.last && child + 1 < parent.children && sibling_end <= s.last) return;
        const int arriving = pending_;
        pending_ = 0;
        if (!block_.arrive(p_.counters + tree_counter(parent.owner, p_.levels, parent.level), arriving,
                           parent.children)) {
          return;
        }
      }
      if (fold(tiles, s, parent.level, parent.index, slots_of(s, parent), 1, parent.children)) return;
      level = parent.level;
      index = parent.index;
    }
  }

  // Folds the children of subtree `index` of `level` into its own slot, or into the output if it is the root (true).
  FLASHPORT_DEVICE bool fold(const Tiles& tiles, const Segment& s, int level, int index, const float* slots, int second,
                             int count) {
    const int rows = tiles.live_rows();
    if (span_of(level) >= s.leaves) {
      fold_states<Tiles::kColumns>(block_, slots, p_.slot_floats, rows, second, count,
                                   [&](int row, int column, const StatePiece& piece) {
                                     write_output_piece<Tiles>(p_, s, block_, row, column, piece);
                                   });
      return true;
    }
    float* to = slots_of(s, parent_of(s, level, index)) + index % kFanOut * p_.slot_floats;
    fold_states<Tiles::kColumns>(
        block_, slots, p_.slot_floats, rows, second, count, [&](int row, int column, const StatePiece& piece) {
          if (column == 0) {
            to[row] = piece.m;
            to[rows + row] = piece.l;
          }
          store_vector(to + slot_output_offset(rows) + static_cast<std::int64_t>(row) * Tiles::kColumns + column,
                       piece.o);
        });
    return false;
  }

  FLASHPORT_DEVICE float* shared_slots(std::int64_t owner, int level) const {
    return p_.slots + tree_shared_slots(owner, p_.levels, level) * p_.slot_floats;
  }
  FLASHPORT_DEVICE float* slots_of(const Segment&, const Parent& parent) const {
    return parent.owner >= 0
               ? shared_slots(parent.owner, parent.level)
               : p_.slots + tree_own_slots(block_.index(), p_.levels, parent.level) * p_.slot_floats;
  }

  const DecodeParams& p_;
  const Block& block_;
  std::int64_t total_, blocks_;
  State node_;
  int pending_ = 0;  // finished children of a cut parent above the nodes, not yet announced
};

}  // namespace flashport::FLASHPORT_TARGET
