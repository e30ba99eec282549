// How the keys of a query tile are cut, in which order the partial results meet, and where they lie in the workspace:
// plain arithmetic that host and device must agree on.
//
//   leaf   64 keys; a kernel's main loop takes one or two at a time
//   chunk  1 to 16 leaves, and more only of very long tiles, in one running state; the longer the tile, the longer
//          its chunks
//   group  4 chunks, combined left to right
//   tile   all its groups, combined left to right
//
// This order follows from the tile's own length, the number of kv heads and the kernel, whatever the schedule.
//
// The workspace is kCounterCapacity counters (uint32, zero between calls), then the partial results of each block. The
// counters have one address whatever the shapes of a call are, so that calls of any shapes may share a workspace.
#pragma once

#include <bit>

#include "common/device/decode/config.h"
#include "common/device/decode/params.h"

namespace flashport {

inline constexpr int kLeafShift = 6, kLeafKeys = 1 << kLeafShift;
inline constexpr int kGroupChunks = 4;
inline constexpr int kMostChunks = 128;  // of a tile
inline constexpr int kMostGroups = kMostChunks / kGroupChunks;
inline constexpr int kLongestLine = 1 << 29;             // leaves of all tiles of a call; whole chunks on the line
inline constexpr std::int64_t kCounterCapacity = 32768;  // one a block and slice
inline constexpr std::int64_t kCounterBytes = kCounterCapacity * 4;

[[nodiscard]] constexpr std::int64_t leaves_of(std::int64_t keys) { return (keys + kLeafKeys - 1) / kLeafKeys; }

// Kernels of blocks that also read segments of 16 bits take leaves of half as many keys of these, which are about as
// many bytes as those of q8_0. A turn of theirs has two leaves of one segment.
inline constexpr int kWideLeafKeys = kLeafKeys / 2;
template <class Int>
[[nodiscard]] constexpr Int segment_leaves(Int keys, bool is_wide) {
  constexpr Int kWideTurn = 2 * kWideLeafKeys, kTurn = 2 * kLeafKeys;  // each a division by a constant
  return 2 * (is_wide ? (keys + (kWideTurn - 1)) / kWideTurn : (keys + (kTurn - 1)) / kTurn);
}

// The leaves of a chunk, and what a division by them takes.
struct ChunkSize {
  std::int32_t leaves;
  std::uint32_t inverse;  // 2^31 / leaves, rounded up; of 10, 12 and 14 leaves to 16 bits

  // The number of the chunk that has `leaf`. Exact in tiles that have such chunks: those of sizes between powers of two
  // have at most 14 << kMostTargetShift leaves, and it takes more than 4,000 to carry into a quotient. A quota may be
  // longer: then what whole() gives may be some chunks more than needed.
  [[nodiscard]] constexpr int number(int leaf) const {
    return static_cast<int>((std::uint64_t{2 * static_cast<std::uint32_t>(leaf)} * inverse) >> 32);
  }
  // Chunks that begin before `leaf`.
  [[nodiscard]] constexpr int count(int leaf) const { return number(leaf + leaves - 1); }
  // Leaves rounded up to whole chunks: at most twice as many.
  [[nodiscard]] constexpr int whole(int leaf) const { return count(leaf) * leaves; }
};
inline constexpr int kMostTargetShift = 6;

// So many leaves that a tile has at most 1 << target_shift chunks: 1, 2, 4, 8, 10, 12, 14 or 16, or of these the powers
// of two alone. Where that would take more, 16, and longer ones only where there would be more than kMostChunks. Finer
// ones have half of the leaves where these are 8 to 16, rounded up to an even number. Blocks run this once, so it has
// few instructions and no branch.
[[nodiscard, gnu::always_inline]] constexpr ChunkSize chunk_size(int leaves, const ChunkRule& rule) {
  constexpr std::uint32_t kOne = 1u << 31;
  constexpr int kMostBits = std::bit_width(unsigned{kMostChunks} - 1);
  const auto wanted = static_cast<unsigned>(leaves + (1 << rule.target_shift) - 1) >> rule.target_shift;
  const int bits = std::bit_width(wanted - 1);
  int shift = (bits < 4 ? bits : 4) - (rule.finer && (bits == 3 || bits == 4) ? 1 : 0);
  shift = shift > rule.least_shift ? shift : rule.least_shift;
  const int longest = std::bit_width(static_cast<unsigned>(leaves - 1)) - kMostBits;
  shift = shift > longest ? shift : longest;
  // Above eight and below 15: 10 + 2 * step, whose inverses the polynomial has, or six.
  const unsigned above = wanted - 9;
  const unsigned step = above >> 1;
  const std::uint32_t inverse = rule.finer ? kOne / 6 + 1 : (3277u + step * (78u * step - 624u)) << 16;
  const bool between = above < (rule.powers ? 0u : rule.finer ? 4u : 6u);
  return {between ? (rule.finer ? 6 : static_cast<int>(10 + 2 * step)) : 1 << shift, between ? inverse : kOne >> shift};
}
inline constexpr int kMostWideShift = 5;
inline constexpr int kMostChunkLeaves = 16;  // but for the rule about kMostChunks

// So many chunks that the tiles of all kv heads of one long sequence fill a large device; of one head half as many, or
// it would take longer to combine them than they save.
[[nodiscard]] constexpr int chunk_target_shift(int num_kv_heads) {
  int shift = 0;
  while (shift < kMostTargetShift && num_kv_heads << (shift + 1) <= kMostChunks) ++shift;
  return shift;
}

// The rule of a kernel: chunks have two leaves at least where a turn takes two, and where states are large or wide.
// Where they are wide, tiles with one or two kv heads have half as many chunks up to 128 leaves, and more from 257 on.
[[nodiscard]] constexpr ChunkRule chunk_rule(int num_kv_heads, const DecodeSplit& split) {
  const int target_shift = chunk_target_shift(num_kv_heads);
  const int least_shift = split.turn_leaves > 1 || split.large || split.wide ? 1 : 0;
  const bool longer = split.wide && target_shift > kMostWideShift;
  return {longer ? kMostWideShift : target_shift, least_shift, split.finer || longer, split.powers || longer};
}

// An upper bound for tiles of up to `leaves` leaves.
[[nodiscard]] constexpr int most_chunks(std::int64_t leaves, const ChunkRule& rule) {
  const std::int64_t of_long_tiles = (leaves + kMostChunkLeaves - 1) / kMostChunkLeaves;
  const std::int64_t target = std::int64_t{rule.finer ? 2 : 1} << rule.target_shift;
  const std::int64_t wanted = of_long_tiles > target ? of_long_tiles : target;
  const std::int64_t most = wanted < kMostChunks ? wanted : kMostChunks;
  const std::int64_t shortest = (leaves + (1 << rule.least_shift) - 1) >> rule.least_shift;
  return static_cast<int>(most < shortest ? most : shortest);
}

// What a block with chunks [begin, end) of a tile's `chunks` publishes: each group that it holds whole as one result,
// the chunks of others one by one. The number of the result that begins with `chunk`.
[[nodiscard, gnu::always_inline]] constexpr int partial_index(int begin, int end, int chunks, int chunk) {
  const auto holds = [&](int group) {
    const int last = group * kGroupChunks + kGroupChunks < chunks ? group * kGroupChunks + kGroupChunks : chunks;
    return group * kGroupChunks >= begin && last <= end;
  };
  const int group = chunk / kGroupChunks;
  const int first_group = begin / kGroupChunks;
  if (group == first_group && !holds(group)) return chunk - begin;
  const int first_held = holds(first_group) ? first_group : first_group + 1;
  const int before_held = holds(first_group) ? 0 : first_held * kGroupChunks - begin;
  return before_held + (group - first_held) + (holds(group) ? 0 : chunk % kGroupChunks);
}
// An upper bound for tiles of up to `chunks` chunks.
[[nodiscard]] constexpr int most_partials(int chunks) {
  constexpr int kMost = kMostGroups + 2 * (kGroupChunks - 1);
  return chunks < kMost ? chunks : kMost;
}

// A block publishes results of two tiles at most: of one that began in an earlier block (side 0) and of one that ends
// in a later block or has all its results in this one (side 1). The chunks of one group lie beside them where registers
// are few.
[[nodiscard]] constexpr int partials_per_block(int side_partials) { return 2 * side_partials + kGroupChunks; }
[[nodiscard]] constexpr std::int64_t partial_number(std::int64_t block, int side_partials, int side, int index) {
  return block * partials_per_block(side_partials) + side * side_partials + index;
}
[[nodiscard]] constexpr std::int64_t group_chunk_number(std::int64_t block, int side_partials, int chunk_of_group) {
  return partial_number(block, side_partials, 2, chunk_of_group);
}

// A partial result in memory has one or more slices, each of which some threads of a block publish and combine by
// themselves: (m, l) [rows], padded to 16 bytes, then o [rows, columns]; rows are the live ones.
[[nodiscard]] constexpr int slice_output_offset(int rows) { return (2 * rows + 3) / 4 * 4; }
[[nodiscard]] constexpr int slice_floats(int rows, int columns) { return slice_output_offset(rows) + rows * columns; }

[[nodiscard]] constexpr std::int64_t partials_bytes(std::int64_t blocks, int side_partials, int floats_per_partial) {
  return blocks * partials_per_block(side_partials) * floats_per_partial * 4;
}

// Query tiles of a sequence that a grid walks through concurrently: a divisor of their number that leaves few blocks
// of the grid idle.
inline constexpr int kMostConcurrentTiles = 8;
[[nodiscard]] constexpr int concurrent_tiles(std::int64_t tiles, std::int64_t grid, int most = kMostConcurrentTiles) {
  for (int count = most; count > 1; --count) {
    if (tiles % count == 0 && grid % count * 32 <= grid) return count;
  }
  return 1;
}

// Tiles go side by side only where every block gets some leaves: else these spread better. Heads of q8_0 that teams
// copy at once are worth it from fewer on.
inline constexpr int kLeastConcurrentLeaves = 8, kLeastLeavesOfTeams = 4;
[[nodiscard]] constexpr LineCut line_cut(std::int64_t tiles, std::int64_t grid, int concurrent, int least_leaves) {
  return {make_divisor(concurrent), make_divisor(grid / concurrent), static_cast<std::int32_t>(tiles / concurrent),
          least_leaves};
}

// Leaves of a work range. Where all sequences take as much of the line, rounded up to whole chunks, and else to four
// (or two), where that costs little balance: then whole sequences and whole chunks fall to blocks where they fill the
// device. Ranges of many chunks hold as many at most either way, and whole ones leave more blocks without any: so they
// are rounded by less.
inline constexpr int kFewWholeChunks = 6;
[[nodiscard, gnu::always_inline]] constexpr int rounded_quota(int quota, const ChunkSize& chunk) {
  const int most_extra = static_cast<int>(static_cast<unsigned>(quota) / 8);
  const int chunks = chunk.count(quota), whole = chunks * chunk.leaves;
  const bool is_whole = whole - quota <= (chunks <= kFewWholeChunks ? most_extra : most_extra / 4);
  if (chunk.leaves > 4) return is_whole ? whole : quota + (quota & 1);
  const int to_four = -quota & 3;
  if (to_four <= most_extra) return quota + to_four;
  return quota + ((quota & 1) <= most_extra ? quota & 1 : 0);
}

}  // namespace flashport
