// From the states of leaves to the output of a query tile, in the fixed order of chunks.h. Every combination is
// merge_value() in that order, so any cut of the line into blocks gives the same bits.
//
// A block that has a whole tile combines it in registers and writes its output. Otherwise it publishes each group of
// chunks that it holds whole as one partial result, and the other chunks one by one; then it adds the number of its
// chunks to the tile's counter, which belongs to the block of the tile's first chunk. The block that completes the sum
// combines the tile: which block published what follows from the line by division. No block waits for another. Counters
// come back to zero by themselves, so a launch can be replayed.
//
// A state may have slices (rows and columns of it): then the threads of each slice do all this by themselves, with a
// counter and a list of their own, and no barrier of the block.
#pragma once

#include <type_traits>

#include "common/device/decode/combine.h"
#include "common/device/decode/output.h"
#include "common/device/merge/online_softmax.h"

namespace flashport::FLASHPORT_TARGET::decode {

struct NoState {};

// How many states, of those that are kept, tiles want in the thread's own memory: 1 the tile's, 2 the group's too.
template <class Tiles>
constexpr int states_in_memory() {
  if constexpr (requires { Tiles::kStatesInMemory; }) {
    return Tiles::kStatesInMemory;
  } else {
    return 0;
  }
}

// Whether tiles keep o of the tile in shared memory.
template <class Tiles>
constexpr bool keeps_tile_in_shared() {
  if constexpr (requires { Tiles::kTileInShared; }) {
    return Tiles::kTileInShared;
  } else {
    return false;
  }
}

// Whether the group's state would stay in registers while partial results are combined, if it were not cleared before.
template <class Tiles>
constexpr bool clears_group() {
  if constexpr (requires { Tiles::kClearsGroup; }) {
    return Tiles::kClearsGroup;
  } else {
    return false;
  }
}

// Whether the block that is last combines a tile; else a second launch always does (DecodeSplit::large).
template <class Tiles>
constexpr bool combines_in_launch() {
  if constexpr (requires { Tiles::kCombines; }) {
    return Tiles::kCombines;
  } else {
    return true;
  }
}
struct NoPartialList {};

// Tiles::kKeptStates says for how many more states than one there is room: 2 for the group and the tile, 1 for the
// group, 0: the chunks of a group meet in the workspace too.
enum StateOf { kOfGroup, kOfTile };
template <class Tiles, StateOf kOf>
struct KeptState {
  static constexpr bool kKept = Tiles::kKeptStates > kOf;
  static constexpr bool kShared = kOf == kOfTile && keeps_tile_in_shared<Tiles>();
  using State = std::conditional_t<kShared, merge::KeptRows<Tiles>, merge::SoftmaxState<Tiles>>;
  std::conditional_t<kKept, State, NoState> state;
  FLASHPORT_DEVICE KeptState() {
    if constexpr (kKept && !kShared && states_in_memory<Tiles>() + kOf > 1) keep_in_memory(state);
  }
};

template <class Tiles, class Params>
class ChunkTree {
  using Group = KeptState<Tiles, kOfGroup>;
  using Tile = KeptState<Tiles, kOfTile>;
  static constexpr bool kKeepsGroup = Group::kKept;
  static constexpr bool kKeepsTile = Tile::kKept;
  static constexpr bool kCombines = combines_in_launch<Tiles>();
  static_assert(kCombines || (kKeepsGroup && kKeepsTile), "no state meets in the workspace");

 public:
  using State = merge::SoftmaxState<Tiles>;
  using List = std::conditional_t<kCombines, PartialList, NoPartialList>;

  // `list`: in shared memory. `group` and `tile` are objects of their own, as they may lie in other places.
  FLASHPORT_DEVICE ChunkTree(const Params& p, const Block& block, List& list, Group& group, Tile& tile)
      : p_(p), block_(block), list_(list), group_(group.state), tile_(tile.state) {}

  // At the start of a segment, while its keys are on their way: what the end would wait for.
  FLASHPORT_DEVICE void begin_segment(const Tiles& tiles, const Segment& s, const Line& line) const {
    if constexpr (kKeepsGroup && kCombines) {
      if (meets_in_workspace(s)) prepare_meeting(tiles, s, line);
    }
  }

  // After a turn of the main loop, whose leaves are in `state`: ends what ends with it, and clears the state for the
  // next chunk.
  template <class Cursor>
  FLASHPORT_DEVICE void end_turn(const Tiles& tiles, const Cursor& now, State& state) {
    const Segment& s = now.segment;
    const int end = now.leaf + Tiles::kTurnLeaves;
    const bool segment_ends = end >= s.last;
    if (!segment_ends && s.chunk.number(end) * s.chunk.leaves != end) return;
    end_chunk(tiles, s, state, s.chunk.number(now.leaf));
    if (segment_ends) {
      if constexpr (kCombines) end_segment(tiles, s, now.line);
      if constexpr (clears_group<Tiles>()) merge::clear(tiles, group_);
    }
    merge::clear(tiles, state);
  }

 private:
  // Read again where it is needed, after many leaves.
  FLASHPORT_DEVICE const Params& params() const { return reread(p_); }
  FLASHPORT_DEVICE static int chunks_of(const Segment& s) { return s.chunks_before(s.leaves); }
  FLASHPORT_DEVICE float* partial(const Tiles& tiles, std::int64_t number) const {
    return params().partials + (number * params().slices + tiles.slice()) * params().slice_floats;
  }
  FLASHPORT_DEVICE float* partial_of(const Tiles& tiles, const Segment& s, int chunk) const {
    const int begin = s.chunks_before(s.first);
    const int index = partial_index(begin, s.chunks_before(s.last), chunks_of(s), chunk);
    return partial(tiles, partial_number(block_.index(), params().side_partials, begin > 0 ? 0 : 1, index));
  }

  FLASHPORT_DEVICE void end_chunk(const Tiles& tiles, const Segment& s, const State& state, int chunk) {
    const int chunks = chunks_of(s);
    const int first = chunk / kGroupChunks * kGroupChunks;
    const int last = minimum(first + kGroupChunks, chunks) - 1;
    const bool held = first >= s.chunks_before(s.first) && last < s.chunks_before(s.last);
    if (!held) {
      store_state(tiles, partial_of(tiles, s, chunk), state);
      return;
    }
    if constexpr (kKeepsGroup) {
      if (chunk == first) {
        group_ = state;
      } else {
        merge::merge(tiles, group_, state);
      }
      if (chunk == last) end_group(tiles, s, group_, first);
    } else if (first == last) {
      end_group(tiles, s, state, first);
    } else {
      const std::int64_t number = group_chunk_number(block_.index(), params().side_partials, chunk - first);
      store_state(tiles, partial(tiles, number), state);
      if (chunk == last) combine_group(tiles, s, first, last - first + 1);
    }
  }

  // The state of the group that begins with chunk `first`, which this block holds whole.
  FLASHPORT_DEVICE void end_group(const Tiles& tiles, const Segment& s, const State& state, int first) {
    if constexpr (Tile::kShared) {
      if (s.whole()) {
        State all = state;
        if (first > 0) merge::merge_kept(tiles, tile_, all);
        if (first + kGroupChunks >= chunks_of(s)) {
          write_output(tiles, params(), s, block_, all);
        } else {
          merge::keep(tiles, tile_, all);
        }
        return;
      }
    } else if constexpr (kKeepsTile) {
      if (s.whole()) {
        if (first == 0) {
          tile_ = state;
        } else {
          merge::merge(tiles, tile_, state);
        }
        if (first + kGroupChunks >= chunks_of(s)) write_output(tiles, params(), s, block_, tile_);
        return;
      }
    } else if (s.whole() && chunks_of(s) <= kGroupChunks) {
      write_output(tiles, params(), s, block_, state);
      return;
    }
    store_state(tiles, partial_of(tiles, s, first), state);
  }

  // The same from chunks in the workspace.
  FLASHPORT_DEVICE void combine_group(const Tiles& tiles, const Segment& s, int first, int chunks) const {
    const auto number = static_cast<int>(group_chunk_number(block_.index(), params().side_partials, 0));
    const auto& threads = tiles.slice_threads();
    for (int i = threads.thread(); i < PartialList::padded(chunks); i += threads.threads()) {
      list_.numbers[i] = i < chunks ? number + i : -1;
    }
    threads.sync();
    list_.whole_groups = chunks == 1;
    const bool whole = s.whole() && chunks_of(s) <= kGroupChunks;
    combine(tiles, s, kGroupChunks, whole ? nullptr : partial_of(tiles, s, first));
    threads.sync();  // the next chunks get the same memory, and leaves may have no barrier
  }

  // Whether this block may be the one that combines the segment's tile, from results in the workspace.
  FLASHPORT_DEVICE bool meets_in_workspace(const Segment& s) const {
    return s.whole() ? !kKeepsTile && chunks_of(s) > kGroupChunks : params().combine.parts == 0;
  }
  // Lists those results, and finds the tile's counter.
  FLASHPORT_DEVICE void prepare_meeting(const Tiles& tiles, const Segment& s, const Line& line) const {
    // This block's number, less those of the work ranges before its own.
    const int ranges_before = line.range_of(s.start + s.chunk.whole(s.first));
    const int first_block =
        static_cast<int>(block_.index()) - ranges_before * static_cast<int>(params().cuts[line.cut].concurrent.value);
    list_.counter = block_of(params(), block_, line, s, 0) * params().slices + tiles.slice();
    list_partials(params(), tiles.slice_threads(), list_, s, line, chunks_of(s), first_block);
    tiles.slice_threads().sync();
    list_.whole_groups = has_whole_groups(list_, chunks_of(s));
  }

  FLASHPORT_DEVICE void end_segment(const Tiles& tiles, const Segment& s, const Line& line) const {
    if (!meets_in_workspace(s)) return;
    if constexpr (!kKeepsGroup) prepare_meeting(tiles, s, line);  // the chunks of groups had the list
    if (!s.whole() && !signal(tiles, s)) return;
    tiles.slice_threads().sync();
    combine(tiles, s, chunks_of(s), nullptr);
    tiles.slice_threads().sync();  // the list, and what lies in the workspace
  }

  // Whether these threads are the last ones of the tile's slice.
  FLASHPORT_DEVICE bool signal(const Tiles& tiles, const Segment& s) const {
    const Arrival arrival{params().counters + list_.counter, s.chunks_before(s.last) - s.chunks_before(s.first),
                          chunks_of(s)};
    return tiles.slice_threads().arrive(1, [&](int) { return arrival; }) != 0;
  }

  // The listed results to `to`, or to the output if that is null.
  FLASHPORT_DEVICE void combine(const Tiles& tiles, const Segment& s, int chunks, float* to) const {
    const Params& p = params();
    const auto place = [&](const PieceAt& at) {
      if (to != nullptr) return OutputRow{};
      return output_row(p, s, block_, query_row(p, s, Tiles::kRows, tiles.first_row() + at.row),
                        tiles.first_column() + at.column == 0);
    };
    const auto sink = [&](const OutputRow& out, const PieceAt& at, const StatePiece& piece) {
      if (to == nullptr) {
        write_output_piece(p, out, tiles.first_column() + at.column, piece);
      } else {
        write_piece(piece, to, at);
      }
    };
    combine_partials<PartialList::kAtOnce>(tiles.slice_threads(), PartialSlices(p, tiles.slice()), tiles.slice_rows(),
                                           Tiles::kSliceColumns, list_, chunks, place, sink);
  }

  const Params& p_;
  const Block& block_;
  List& list_;
  decltype(Group::state)& group_;
  decltype(Tile::state)& tile_;
};

}  // namespace flashport::FLASHPORT_TARGET::decode
