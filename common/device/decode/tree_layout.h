// Sizes of the fixed merge tree and of its workspace: plain arithmetic that host and device must agree on.
// A leaf is kLeafKeys keys of one sequence, kv head and row tile; a node of level 1 is kFanOut leaves, of level n
// kFanOut nodes of level n - 1. The tree of a sequence follows from its own length alone.
//
// A workspace is: kCounterCapacity counters (uint32, zero between calls), then grid * slots_per_block slots. The
// counters lie at one place whatever the call's shapes are, so that calls of any shapes may share a workspace and none
// writes partial results over the zeros another one relies on.
#pragma once

#include "common/device/decode/params.h"

namespace flashport {

inline constexpr int kLeafKeys = 64;
inline constexpr int kFanOut = 16;
inline constexpr int kSlotsPerLevel = 2 * kFanOut;
inline constexpr std::int64_t kCounterCapacity = 32768;
inline constexpr std::int64_t kCounterBytes = kCounterCapacity * 4;
// Units of the longest line of work (schedule.h), in nodes if need be: its places and sums fit 32 bits.
inline constexpr int kLongestLine = 1 << 30;

// The smallest L >= 1 for which a root of level L covers max_len keys.
[[nodiscard]] constexpr int tree_levels(std::int64_t max_len) {
  int levels = 1;
  for (std::int64_t keys = std::int64_t{kLeafKeys} * kFanOut; keys < max_len; keys *= kFanOut) ++levels;
  return levels;
}

[[nodiscard]] constexpr std::int64_t tree_leaves(std::int64_t len) { return (len + kLeafKeys - 1) / kLeafKeys; }

// Partial states that one block may have to publish, and the counters that guard them.
[[nodiscard]] constexpr int slots_per_block(int levels) { return levels * kSlotsPerLevel; }
[[nodiscard]] constexpr int counters_per_block(int levels) { return levels; }

// Places in the workspace; blocks are fewer than counters. At each level a block lends kFanOut slots to the children of
// the one parent that it may own together with other blocks, and has kFanOut more for the children of parents that are
// its alone.
[[nodiscard]] constexpr int tree_shared_slots(int owner, int levels, int level) {
  return (owner * levels + level - 1) * kSlotsPerLevel;
}
[[nodiscard]] constexpr int tree_own_slots(int block, int levels, int level) {
  return tree_shared_slots(block, levels, level) + kFanOut;
}
// A block that has one chunk to itself (stage 1, num_splits) shares no parent: it needs places for the children of its
// own above the nodes, which fold in registers.
[[nodiscard]] constexpr std::int64_t chunk_slots_per_block(int levels) { return std::int64_t{levels - 1} * kFanOut; }
[[nodiscard]] constexpr std::int64_t chunk_own_slots(std::int64_t block, int levels, int level) {
  return block * chunk_slots_per_block(levels) + (level - 2) * kFanOut;
}
[[nodiscard]] constexpr int tree_counter(int owner, int levels, int level) {
  return owner * counters_per_block(levels) + level - 1;
}

// A partial state in memory: m [rows] and l [rows], padded to 16 bytes, then o [rows, DV]; rows are the live ones.
[[nodiscard]] constexpr int slot_output_offset(int live_rows) { return (2 * live_rows + 3) / 4 * 4; }
[[nodiscard]] constexpr int slot_floats(int live_rows, int head_dim_v_tile) {
  return slot_output_offset(live_rows) + live_rows * head_dim_v_tile;
}

// What it costs to open a query tile, in leaves: the line of work (schedule.h) counts it where it counts leaves.
inline constexpr int kOpeningLeaves = 1;

// Query tiles of a sequence that a grid walks through side by side: a divisor of their number that leaves few blocks
// of the grid idle.
inline constexpr int kMostTilesSideBySide = 8;
[[nodiscard]] constexpr int tile_group(std::int64_t tiles, std::int64_t grid) {
  for (int group = kMostTilesSideBySide; group > 1; --group) {
    if (tiles % group == 0 && grid % group * 32 <= grid) return group;
  }
  return 1;
}

[[nodiscard]] constexpr LineCut line_cut(std::int64_t tiles, std::int64_t grid, int group) {
  return {make_divisor(group), make_divisor(grid / group), static_cast<std::int32_t>(tiles / group)};
}

// The largest grid whose counters fit.
[[nodiscard]] constexpr std::int64_t max_tree_grid(int levels) { return kCounterCapacity / counters_per_block(levels); }

[[nodiscard]] constexpr std::int64_t tree_workspace_bytes(std::int64_t grid, int levels, int floats_per_slot) {
  return kCounterBytes + grid * slots_per_block(levels) * floats_per_slot * 4;
}

}  // namespace flashport
