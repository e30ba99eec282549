// The fixed tree under the free schedule. A leaf is 64 keys; a node folds kFanOut leaves left to right; 16-ary levels
// above it fold their children left to right, up to one root a query tile. A tile's tree depends on its own leaves
// alone, and every fold is merge() in child order, so any cut of the line into blocks gives the same bits.
//
// A block folds the node that it holds from its first leaf on in registers, and on some targets that node's parent
// likewise. All else meets in the workspace: each parent has kFanOut child slots there. A parent whose leaves lie in
// several blocks belongs to the block of its first leaf (at most one a level and block) and has a counter; who
// completes the last child folds all of them and goes on with the parent. Nobody waits. Counters come back to zero by
// themselves, so a launch can be replayed.
#pragma once

#include <type_traits>

#include "common/device/online_softmax.h"
#include "common/device/output.h"
#include "common/device/schedule.h"

namespace flashport::FLASHPORT_TARGET {

struct NoState {};
template <class State, bool kKept>
using KeptState = std::conditional_t<kKept, State, NoState>;

template <class Tiles>
class SplitTree {
 public:
  using State = SoftmaxState<Tiles>;

  FLASHPORT_DEVICE SplitTree(const DecodeParams& p, const Block& block, const Range& range)
      : p_(p), block_(block), line_(range.line), inverse_share_(block.uniform(inverse_share(p, range.line))) {}

  // Adds the state of leaf `now`. Writes the tile's output where that completes a root that is this block's alone; what
  // is shared with other blocks is left in its slots for finish().
  FLASHPORT_DEVICE void add_leaf(const Tiles& tiles, const LeafCursor& now, const State& leaf_state) {
    const Segment& s = now.segment;
    const int leaf = now.leaf;
    const int node = leaf / kFanOut;
    const int node_first = node * kFanOut;
    const bool node_ends = leaf == minimum(node_first + kFanOut, s.leaves) - 1;
    const bool range_ends = leaf == s.last - 1;
    const bool from_first = node_first >= s.first;
    if (from_first && leaf != node_first) {
      merge(tiles, node_, leaf_state);
    } else {
      node_ = leaf_state;
    }
    if (from_first && !node_ends && !range_ends) return;
    if (from_first && node_ends) {
      add_node(tiles, s, node, range_ends);
      return;
    }
    // A cut node. The owner's leaves come folded, in slot 0, the others one by one.
    if constexpr (Tiles::kKeepsParent) {
      const bool begun = node % kFanOut > 0 && (node - node % kFanOut) * kFanOut >= s.first;
      if (from_first && begun) store_state(tiles, shared_slots(block_.index(), 2), parent_);
    }
    const std::int64_t owner = from_first ? block_.index() : owner_of(s, node_first);
    store_state(tiles, shared_slots(owner, 1) + (from_first ? 0 : leaf - node_first) * params().slot_floats, node_);
  }

  // Behind the last leaf: announces this block's children of the parents that it shares with other blocks, at most two
  // a level, at the ends of its range, which lie in the segments `ends`. Who comes last to a parent folds it.
  FLASHPORT_DEVICE void finish(const Tiles& tiles, const Segment (&ends)[2]) {
    const int segments = ends[0].start == ends[1].start ? 1 : 2;
    FLASHPORT_UNROLL(1)
    for (int i = 0; i < segments; ++i) finish_segment(tiles, block_.uniform(ends[i]));
  }

 private:
  // A subtree of `level`: leaves [first, end), its children of 1 << child_shift leaves.
  struct Subtree {
    int level, index;
    int first, end;
    int child_shift, children;
    bool own;  // this block has all of it
  };

  // A subtree of `level` has 1 << shift_of(level) leaves, or what is left of the tile. Shifts, because divisions by
  // what only the run knows are long, and few leaves stand behind a loop to hide them.
  FLASHPORT_DEVICE static int shift_of(int level) { return 4 * level; }
  FLASHPORT_DEVICE static int span_of(int level) { return 1 << shift_of(level); }
  static_assert(kFanOut == 16);

  FLASHPORT_DEVICE static int shift_up(int leaves, int shift) { return (leaves + (1 << shift) - 1) >> shift; }
  FLASHPORT_DEVICE static Subtree subtree(const Segment& s, int level, int index) {
    const int first = index << shift_of(level);
    const int end = minimum(first + span_of(level), s.leaves);
    const int child_shift = shift_of(level - 1);
    return {
        level, index, first, end, child_shift, shift_up(end - first, child_shift), first >= s.first && end <= s.last};
  }

  // node_ is complete, by this block alone. Where registers allow it, a parent that the block has from its first leaf
  // on is folded there too: what is read back from memory would come behind all the copies that are on their way.
  FLASHPORT_DEVICE void add_node(const Tiles& tiles, const Segment& s, int node, bool range_ends) {
    if constexpr (Tiles::kKeepsParent) {
      const Subtree parent = subtree(s, 2, node / kFanOut);
      if (parent.first >= s.first) {
        if (node % kFanOut == 0) {
          parent_ = node_;
        } else {
          merge(tiles, parent_, node_);
        }
        if (node % kFanOut != parent.children - 1) {
          if (range_ends) store_state(tiles, shared_slots(block_.index(), 2), parent_);
        } else if (span_of(2) >= s.leaves) {
          write_output(tiles, params(), s, block_, parent_);
        } else {
          store_state(tiles, slot_of(s, 2, parent.index), parent_);
          climb_own(tiles, s, 3, parent.index);
        }
        return;
      }
    } else if (s.leaves <= kFanOut) {
      write_output(tiles, params(), s, block_, node_);
      return;
    }
    store_state(tiles, slot_of(s, 1, node), node_);
    if constexpr (!Tiles::kKeepsParent) climb_own(tiles, s, 2, node);  // else the parent is not this block's alone
  }

  // The last child of a parent of `level` lies in its slot: folds the parents that are this block's alone and complete
  // with it.
  FLASHPORT_DEVICE void climb_own(const Tiles& tiles, const Segment& s, int level, int index) {
    for (; span_of(level - 1) < s.leaves; ++level) {
      const Subtree parent = subtree(s, level, index / kFanOut);
      if (!parent.own || index % kFanOut != parent.children - 1) return;
      block_.sync();
      fold<false>(tiles, s, parent, own_slots(level), 1);
      block_.sync();  // the next parent's children come into the same slots, and leaves may have no barrier
      index = parent.index;
    }
  }

  FLASHPORT_DEVICE void finish_segment(const Tiles& tiles, const Segment& s) {
    // Whether the cut child at either end of the range is complete, by this block's doing.
    int first_done = 0;
    int last_done = 0;
    FLASHPORT_UNROLL(1)
    for (int level = 1; level == 1 || span_of(level - 1) < s.leaves; ++level) {
      const int first_index = s.first >> shift_of(level);
      const int last_index = (s.last - 1) >> shift_of(level);
      const bool one = first_index == last_index;
      int done[2] = {0, 0};
      FLASHPORT_UNROLL(1)
      for (int end = 0; end < (one ? 1 : 2); ++end) {
        const int cut_children = one ? first_done + last_done : end == 0 ? first_done : last_done;
        const bool completed =
            complete_shared(tiles, s, subtree(s, level, end == 0 ? first_index : last_index), cut_children);
        (end == 0 ? done[0] : done[1]) = completed;
      }
      first_done = done[0];
      last_done = done[1];
    }
  }

  // Announces this block's children of a shared subtree, `cut_children` of them completed together with other blocks.
  // True if that completes it.
  FLASHPORT_DEVICE bool complete_shared(const Tiles& tiles, const Segment& s, const Subtree& tree, int cut_children) {
    if (tree.own) return false;
    const int from = shift_up(maximum(tree.first, s.first), tree.child_shift);
    const int until = minimum(tree.end, s.last);
    const int to = until == s.leaves ? shift_up(until, tree.child_shift) : until >> tree.child_shift;
    const int arriving = maximum(to - from, 0) + cut_children;
    if (arriving == 0) return false;
    const DecodeParams& p = params();
    const int stretch = stretch_of(p, line_, inverse_share_, s, tree.first);
    const std::int64_t owner = block_of(stretch);
    if (!block_.arrive(p.counters + tree_counter(owner, p.levels, tree.level), arriving, tree.children)) return false;
    int folded = 1;  // children that the owner left folded, in slot 0
    if (tree.level <= (Tiles::kKeepsParent ? 2 : 1)) {
      const std::int64_t owners_end = stretch_begin(p, line_, stretch + 1);
      const int owners = static_cast<int>(leaves_before(owners_end - s.start, line_.unit)) - tree.first;
      folded = maximum(owners >> tree.child_shift, 1);
    }
    fold<true>(tiles, s, tree, shared_slots(owner, tree.level), folded);
    return true;
  }

  // Folds slot 0 and the slots from `second` on into the subtree's own slot, or into the output if it is the root.
  // kBehindLoop: the pipeline's shared memory is free.
  template <bool kBehindLoop>
  FLASHPORT_DEVICE void fold(const Tiles& tiles, const Segment& s, const Subtree& tree, const float* slots,
                             int second) {
    const DecodeParams& p = params();
    const int rows = tiles.live_rows();
    const bool root = span_of(tree.level) >= s.leaves;
    float* to = root ? nullptr : slot_of(s, tree.level, tree.index);
    const int count = tree.level == 1 ? tree.end - tree.first : tree.children;
    const auto sink = [&](int row, int column, const StatePiece& piece) {
      if (root) {
        write_output_piece<Tiles::kRows>(p, s, block_, row, column, piece);
      } else {
        write_piece(piece, to, rows, row, Tiles::kColumns, column);
      }
    };
    if constexpr (kBehindLoop && Tiles::kFoldRoomFloats > 0) {
      fold_states_gathered(tiles, block_, slots, static_cast<int>(p.slot_floats), second, count, sink);
    } else {
      constexpr int kAtOnce = kBehindLoop ? kFoldAllAtOnce : kFoldAtOnce;
      fold_states<Tiles::kColumns, kAtOnce>(block_, slots, p.slot_floats, rows, second, count, sink);
    }
  }

  // The block of this tile that works on a stretch, and the one whose range holds `leaf`.
  FLASHPORT_DEVICE std::int64_t block_of(int stretch) const {
    const Divisor& group = params().cuts[line_.cut].group;
    const int index = static_cast<int>(block_.index());
    return index + (stretch - divide(index, group)) * static_cast<int>(group.value);
  }
  FLASHPORT_DEVICE std::int64_t owner_of(const Segment& s, int leaf) const {
    return block_of(stretch_of(params(), line_, inverse_share_, s, leaf));
  }

  // Where the finished subtree `index` of `level` goes: among the children of its parent.
  FLASHPORT_DEVICE float* slot_of(const Segment& s, int level, int index) const {
    const Subtree parent = subtree(s, level + 1, index / kFanOut);
    float* slots = parent.own ? own_slots(level + 1) : shared_slots(owner_of(s, parent.first), level + 1);
    return slots + index % kFanOut * params().slot_floats;
  }
  FLASHPORT_DEVICE float* shared_slots(std::int64_t owner, int level) const {
    const DecodeParams& p = params();
    return p.slots + tree_shared_slots(owner, p.levels, level) * p.slot_floats;
  }
  FLASHPORT_DEVICE float* own_slots(int level) const {
    const DecodeParams& p = params();
    return p.slots + (p.num_chunks > 0 ? chunk_own_slots(block_.index(), p.levels, level)
                                       : tree_own_slots(block_.index(), p.levels, level)) *
                         p.slot_floats;
  }

  // What few leaves need is read again where it is needed.
  FLASHPORT_DEVICE const DecodeParams& params() const { return reread(p_); }

  const DecodeParams& p_;
  const Block& block_;
  const Line line_;
  const float inverse_share_;
  State node_;
  KeptState<State, Tiles::kKeepsParent> parent_;
};

}  // namespace flashport::FLASHPORT_TARGET
