// The fixed tree under the free schedule. A leaf is 64 keys; a node folds kFanOut leaves left to right; 16-ary levels
// above it fold their children left to right, up to one root a query tile. A tile's tree depends on its own leaves
// alone, and every fold is merge_value() in child order, so any cut of the line into blocks gives the same bits.
//
// A block folds the node that it holds from its first leaf on in registers, and on some targets that node's parent
// likewise. All else meets in the workspace: each parent has kFanOut child slots there. A parent whose leaves lie in
// several blocks belongs to the block of its first leaf (at most one a level and block) and has a counter; who
// completes the last child folds all of them and goes on with the parent. Nobody waits. Counters come back to zero by
// themselves, so a launch can be replayed.
#pragma once

#include <type_traits>

#include "common/device/decode/announcements.h"
#include "common/device/decode/fold.h"
#include "common/device/decode/output.h"
#include "common/device/merge/online_softmax.h"

namespace flashport::FLASHPORT_TARGET::decode {

struct NoState {};
template <class State, bool kKept>
using KeptState = std::conditional_t<kKept, State, NoState>;

template <class Tiles>
class SplitTree {
 public:
  using State = merge::SoftmaxState<Tiles>;

  // `ends`: in shared memory, where the range's first tile is planned already.
  FLASHPORT_DEVICE SplitTree(const DecodeParams& p, const Block& block, const RangeEnds& ends)
      : block_(block), slots_(p, block), ends_(ends) {}

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
      merge::merge(tiles, node_, leaf_state);
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
      if (from_first && begun) store_own(tiles, 2, parent_);
    }
    if (from_first) {
      store_own(tiles, 1, node_);
    } else {
      store_state(tiles, slots_.at(ends_.at[0][0][0].slots + leaf - node_first), node_);
    }
  }

  // Behind the last leaf: makes the block's announcements, level by level, those of both ends of the range's first tile
  // and its last together. Who comes last to a parent folds it; two at once are folded by half of the block each.
  FLASHPORT_DEVICE void finish(const Tiles& tiles) const {
    const int levels = maximum(block_.uniform(ends_.levels[0]), block_.uniform(ends_.levels[1]));
    unsigned done = 0;  // whether the cut child at an end of a tile is complete, by this block's doing
    FLASHPORT_UNROLL(1)
    for (int level = 0; level < levels; ++level) {
      done = block_.arrive(kEnds, [&](int i) { return arrival(level, i, done); });
      FLASHPORT_UNROLL(1)
      for (unsigned rest = done; rest != 0;) {
        const int first = lowest_bit(rest);
        rest &= rest - 1;
        const bool two = kFoldsHalves && rest != 0;
        if constexpr (kFoldsHalves) {
          const int half = 2 * block_.thread() >= block_.threads() ? 1 : 0;
          if (two) fold_end<2>(tiles, level, half == 0 ? first : lowest_bit(rest), half);
          if (two) rest &= rest - 1;
        }
        if (!two) fold_end<1>(tiles, level, first, 0);
        if (rest != 0) block_.sync();  // the scratch memory is the next fold's
      }
    }
  }

 private:
  // What this block has folded of a parent that it owns together with others.
  FLASHPORT_DEVICE void store_own(const Tiles& tiles, int level, const State& state) const {
    store_state(tiles, slots_.at(slots_.shared(slots_.this_block(), level)), state);
  }

  // Where the finished subtree `index` of `level` goes: among the children of its parent, which is this block's alone,
  // or belongs to it, or reaches back before the first tile's part of the range.
  FLASHPORT_DEVICE float* slot_of(const Segment& s, int level, int index) const {
    const Subtree parent = subtree(s, level + 1, index / kFanOut);
    std::int64_t children = ends_.at[0][level][0].slots;
    if (parent.first >= s.first) children = slots_.shared(slots_.this_block(), level + 1);
    if (parent.own) children = slots_.own(level + 1);
    return slots_.at(children + index % kFanOut);
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
          merge::merge(tiles, parent_, node_);
        }
        if (node % kFanOut != parent.children - 1) {
          if (range_ends) store_own(tiles, 2, parent_);
        } else if (span_of(2) >= s.leaves) {
          write_output(tiles, slots_.params(), s, block_, parent_);
        } else {
          store_state(tiles, slot_of(s, 2, parent.index), parent_);
          climb_own(tiles, s, 3, parent.index);
        }
        return;
      }
    } else if (s.leaves <= kFanOut) {
      write_output(tiles, slots_.params(), s, block_, node_);
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
      const bool root = span_of(level) >= s.leaves;
      fold<kInLoop>(tiles, s, slots_.at(slots_.own(level)), 1, parent.children,
                    root ? nullptr : slot_of(s, level, parent.index));
      block_.sync();  // the next parent's children come into the same slots, and leaves may have no barrier
      index = parent.index;
    }
  }

  static constexpr int kEnds = 4;    // end i % 2 of tile i / 2
  static constexpr int kInLoop = 0;  // in place of parts
  static constexpr bool kFoldsHalves = folds_halves<Tiles>();

  FLASHPORT_DEVICE static int lowest_bit(unsigned ends) { return ends & 1 ? 0 : ends & 2 ? 1 : ends & 4 ? 2 : 3; }

  // Without a branch, because lanes work out one each. `done`: the ends at which the level below is complete.
  FLASHPORT_DEVICE Arrival arrival(int level, int i, unsigned done) const {
    const int tile = i / 2;
    const Announcement& a = ends_.at[tile][level][i % 2];
    const int cut_children = static_cast<int>(done >> i & 1) + (a.one ? static_cast<int>(done >> (i ^ 1) & 1) : 0);
    const bool shared = level < ends_.levels[tile] && a.children != 0;
    return {slots_.params().counters + a.counter, shared ? a.arriving + cut_children : 0, a.children};
  }

  // By part `part` of kParts of the block.
  template <int kParts>
  FLASHPORT_DEVICE void fold_end(const Tiles& tiles, int level, int i, int part) const {
    const Announcement a = block_.uniform(ends_.at[i / 2][level][i % 2]);
    float* parent = a.parent < 0 ? nullptr : slots_.at(a.parent);
    fold<kParts>(tiles, ends_.segments[i / 2], slots_.at(a.slots), a.folded, a.children, parent, part);
  }

  // Folds slot 0 and slots second .. children - 1 to `parent`, or into the output if that is null. Behind the
  // loop, where registers are free and nothing hides how long it takes, part `part` of kParts of the block does it.
  template <int kParts>
  FLASHPORT_DEVICE void fold(const Tiles& tiles, const Segment& s, const float* slots, int second, int children,
                             float* parent, int part = 0) const {
    const DecodeParams& p = slots_.params();
    const int rows = tiles.live_rows();
    const auto place = [&](int row, int column) {
      if (parent != nullptr) return OutputRow{};
      return output_row(p, s, block_, query_row(p, s, Tiles::kRows, row), column == 0);
    };
    const auto sink = [&](const OutputRow& to, int row, int column, const StatePiece& piece) {
      if (parent == nullptr) {
        write_output_piece(p, to, column, piece);
      } else {
        write_piece(piece, parent, rows, row, Tiles::kColumns, column);
      }
    };
    if constexpr (kParts != kInLoop && kFoldsStaged) {
      fold_states_staged<Tiles::kColumns, Tiles::kRows, Tiles::kScratchFloats, kParts>(
          block_, part, tiles.scratch(), slots, p.slot_floats, rows, second, children, place, sink);
    } else {
      constexpr int kAtOnce = kParts == kInLoop ? kFoldAtOnce : kFoldAtEnd;
      fold_states<Tiles::kColumns, kAtOnce>(block_, slots, p.slot_floats, rows, second, children, place, sink);
    }
  }

  const Block& block_;
  const TreeSlots slots_;
  const RangeEnds& ends_;
  State node_;
  KeptState<State, Tiles::kKeepsParent> parent_;
};

}  // namespace flashport::FLASHPORT_TARGET::decode
