// The fixed tree under the free schedule. A leaf is 64 keys; a node folds kFanOut leaves left to right; 16-ary levels
// above it fold their children left to right, up to one root a query tile. A tile's tree depends on its own leaves
// alone, and every fold is merge() in child order, so any cut of the line into blocks gives the same bits.
//
// In a block a node that it holds from its first leaf on is folded in registers. What is cut meets in the workspace: a
// parent whose leaves lie in several blocks belongs to the block of its first leaf (at most one a level and block), which
// lends it kFanOut child slots and a counter. Who completes the last child folds all of them and goes on with the
// parent. Nobody waits. Counters come back to zero by themselves, so a launch can be replayed.
#pragma once

#include "common/device/online_softmax.h"
#include "common/device/schedule.h"
#include "common/device/tree_layout.h"

namespace flashport::FLASHPORT_TARGET {

template <class Tiles>
class SplitTree {
 public:
  using State = SoftmaxState<Tiles>;

  FLASHPORT_DEVICE SplitTree(const DecodeParams& p, const Block& block, const Range& range)
      : p_(p), block_(block), total_(range.total), blocks_(range.blocks) {}

  // Adds the state of leaf `now`. Where that completes the tile's root, moves the result into `state` and says so.
  FLASHPORT_DEVICE bool add_leaf(const Tiles& tiles, const LeafCursor& now, State& state) {
    const Segment& s = now.segment;
    const int leaf = now.leaf;
    const int node_first = leaf - leaf % kFanOut;
    const int node_end = minimum(node_first + kFanOut, s.leaves);
    const bool range_ends = leaf == s.last - 1;
    const bool node_ends = leaf == node_end - 1;
    std::int64_t owner = block_.index();
    int arriving = 0;  // leaves of a cut node that this block brings
    if (node_first >= s.first) {
      if (leaf == node_first) {
        node_ = state;
      } else {
        merge(tiles, node_, state);
      }
      if (!node_ends && !range_ends) return false;
      state = node_;
      if (!node_ends) {
        store_state(tiles, shared_slot(owner, 1, 0), state);
        arriving = leaf - node_first + 1;
      }
    } else {
      owner = owner_of(total_, s.start + node_first, blocks_);
      store_state(tiles, shared_slot(owner, 1, leaf - node_first), state);
      if (!node_ends && !range_ends) return false;
      arriving = leaf - maximum(node_first, s.first) + 1;
    }
    if (arriving > 0) {
      if (!block_.arrive(counter(owner, 1), arriving, node_end - node_first)) return false;
      // The owner's leaves come folded in slot 0, the others one by one.
      const int folded = static_cast<int>(range_begin(total_, owner + 1, blocks_) - s.start) - node_first;
      load_state(tiles, shared_slot(owner, 1, 0), state);
      fold(tiles, owner, 1, folded, node_end - node_first, state);
    }
    return complete(tiles, s, leaf / kFanOut, state);
  }

 private:
  FLASHPORT_DEVICE void fold(const Tiles& tiles, std::int64_t owner, int level, int from, int to, State& acc) {
    for (int i = from; i < to; ++i) merge_stored(tiles, acc, shared_slot(owner, level, i));
  }

  // `state` is the finished node `index`. Climbs while parents are finished with it; true at the root.
  FLASHPORT_DEVICE bool complete(const Tiles& tiles, const Segment& s, int index, State& state) {
    int level = 1;
    int span = kFanOut;  // leaves under a subtree of `level`
    while (span < s.leaves) {
      const int parent = index / kFanOut;
      const int child = index % kFanOut;
      const int parent_span = span * kFanOut;
      const int parent_first = parent * parent_span;
      const int parent_end = minimum(parent_first + parent_span, s.leaves);
      const int children = (parent_end - parent_first + span - 1) / span;
      ++level;
      if (parent_first >= s.first && parent_end <= s.last) {
        fold_own(tiles, level, child, state);
        if (child != children - 1) return false;
      } else {
        const std::int64_t owner = owner_of(total_, s.start + parent_first, blocks_);
        store_state(tiles, shared_slot(owner, level, child), state);
        ++pending_;
        // Children that are this block's alone are announced together, with the last of them.
        const int child_first = index * span;
        const bool own = child_first >= s.first && minimum(child_first + span, parent_end) <= s.last;
        const bool sibling_own = child + 1 < children && minimum(child_first + 2 * span, parent_end) <= s.last;
        if (own && sibling_own) return false;
        const int arriving = pending_;
        pending_ = 0;
        if (!block_.arrive(counter(owner, level), arriving, children)) return false;
        load_state(tiles, shared_slot(owner, level, 0), state);
        fold(tiles, owner, level, 1, children, state);
      }
      index = parent;
      span = parent_span;
    }
    return true;
  }

  // Folds a child into this block's own running parent of `level`; leaves the running value in `state`.
  FLASHPORT_DEVICE void fold_own(const Tiles& tiles, int level, int child, State& state) {
    float* slot = own_slot(level);
    if (child > 0) {
      merge_onto_stored(tiles, slot, state);
      block_.sync();  // every wave has read the slot before it is written again
    }
    store_state(tiles, slot, state);
    block_.sync();
  }

  FLASHPORT_DEVICE float* shared_slot(std::int64_t owner, int level, int child) const {
    const DecodeParams& p = reread(p_);
    return p.slots + tree_shared_slot(owner, p.levels, level, child) * p.slot_floats;
  }
  FLASHPORT_DEVICE float* own_slot(int level) const {
    const DecodeParams& p = reread(p_);
    return p.slots + tree_own_slot(block_.index(), p.levels, level) * p.slot_floats;
  }
  FLASHPORT_DEVICE std::uint32_t* counter(std::int64_t owner, int level) const {
    const DecodeParams& p = reread(p_);
    return p.counters + tree_counter(owner, p.levels, level);
  }

  const DecodeParams& p_;
  const Block& block_;
  std::int64_t total_, blocks_;
  State node_;
  int pending_ = 0;  // finished children of a cut parent above the nodes, not yet announced
};

}  // namespace flashport::FLASHPORT_TARGET
