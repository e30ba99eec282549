// Rows of fewer bits as boxes leave them in shared memory (stored_boxes.h): where they lie, in which order they come,
// and how a lane reads a row that it has in registers. Nothing here is of the device, so tests run it on a host.
//
// Each of the warps that widen has slots of 32 rows, one of a lane. Rows lie one after the other as they are stored,
// each with bytes around it that are not its own: so that a row takes an odd number of vectors of 16 bytes, and eight
// rows have eight different places in the banks. At every step a warp reads the same vector of 32 rows, and then writes
// the same vector of 32 rows of the widened tile, whose swizzle puts those of eight rows into different banks too.
#pragma once

#include "common/device/attention/params.h"

namespace flashport::cuda_attention {

inline constexpr int kStoredDim = 128;       // values of a row
inline constexpr int kStoredRows = 32;       // of a slot
inline constexpr int kMostStoredSlots = 4;   // of a warp, landed or on their way
inline constexpr int kMostStoredRow = 144;   // bytes that a row takes
inline constexpr int kWideningWarps = 4;     // two of keys, two of values
inline constexpr int kWarpsOfTile = 2;       // the first has the first half of the block's rows of a tile
inline constexpr int kSlotsOfTile = 2;       // that a warp has of a whole tile, one after the other
inline constexpr int kStoredQueryWarps = 2;  // that bring queries beside them

// What rows of `row_bytes` take in a box.
constexpr int stored_row_pitch(int row_bytes) { return 16 * ((row_bytes + 15) / 16 | 1); }

// Tokens that lie at odd multiples of 8 bytes come two by two: the even rows of a slot in one box, the odd ones in
// another after it. A lane then has a row of its own such that eight lanes have four rows of both, and neither what
// they read nor what they write shares banks.
constexpr int paired_place(int row) { return row % 2 * (kStoredRows / 2) + row / 2; }  // of a row in the slot
constexpr int paired_row(int lane) {
  const int four = lane / 8 % 2, odd = lane / 4 % 2;
  return lane / 16 * 16 + 2 * (lane % 4 + 4 * (four ^ odd)) + odd;
}

// TMA begins boxes at multiples of 16 bytes only. A row that begins 8 bytes after one has so many bytes before it in
// its place.
constexpr int stored_row_begin(const StoredBox& box, int kv_head, int token) {
  return kv_head * box.head_bytes + token % 2 * box.pair_bytes;
}
constexpr int stored_row_shift(const StoredBox& box, int kv_head, int token) {
  return stored_row_begin(box, kv_head, token) % 16;
}

// Where a box begins in a tensor map, and which row of the slot is its first. `first` is its first token, `row` that
// token's row in the slot without pairs; box 1 is that of a pair's second tokens.
struct StoredBoxPlace {
  int x, y, z, row;
};
constexpr int boxes_of_place(const StoredBox& box) { return box.pair_bytes == 0 ? 1 : 2; }
constexpr StoredBoxPlace stored_box_place(const StoredBox& box, int kv_head, int first, int row, int i) {
  const int z = box.head_bytes == 0 ? kv_head : 0, token = first + i;
  const int x = stored_row_begin(box, kv_head, token) / 16 * 16;
  if (box.pair_bytes == 0) return {x, token, z, row};
  return {x, token / 2, z, paired_place(row + i)};
}

// Factors beside rows lie in a slot after its rows: one of each row, or halves, one of every 8 values. Other factors,
// and those of other formats, come with rows that TMA does not bring: each pair of both has a loop of its own.
enum class Factors { kNone, kOfRow, kHalves };
inline constexpr int kFactorDims = 8;  // of kHalves
constexpr Factors factors_of(const KeyScales& scales) {
  if (scales.data == nullptr) return Factors::kNone;
  return scales.dims_per_scale == kFactorDims ? Factors::kHalves : Factors::kOfRow;
}
constexpr bool may_have_factors(KvFormat format) {
  return format == KvFormat::kInt8 || format == KvFormat::kInt4 || format == KvFormat::kFp8E4M3;
}
constexpr int factor_bytes(Factors factors) {
  if (factors == Factors::kNone) return 0;
  return factors == Factors::kOfRow ? 4 : 2 * (kStoredDim / kFactorDims);
}
// From a row's to the next row's: so that those of eight rows have different places in the banks.
constexpr int factor_pitch(Factors factors) {
  const int bytes = factor_bytes(factors);
  return bytes > 4 ? bytes + 16 : bytes;
}
// A factor of a row comes as the word that has it. Where it is a half, its head says which one of the word.
constexpr int factor_begin(const KeyScales& scales, std::uintptr_t data, int kv_head) {
  return scales.dtype == DType::kFloat16 ? static_cast<int>((data + 2 * kv_head * scales.stride_head) & 2) : 0;
}
// Whether factors, if there are any, come to slots: as copies of whole words or vectors.
constexpr bool come_to_slots(const KeyScales& scales, std::uintptr_t data, KvFormat format) {
  const Factors factors = factors_of(scales);
  if (factors == Factors::kNone) return true;
  const bool is_half = scales.dtype == DType::kFloat16;
  const std::int64_t size = is_half ? 2 : 4, of_pages = size * (scales.stride_page | scales.stride_token);
  if (!may_have_factors(format)) return false;
  if (factors == Factors::kOfRow) {
    return (scales.dims_per_scale == 0 || scales.dims_per_scale == kStoredDim) && of_pages % 4 == 0;
  }
  return is_half && scales.stride_group == 1 &&
         (of_pages | size * scales.stride_head | static_cast<std::int64_t>(data)) % 16 == 0;
}

// A slot of a warp, and the phase of the slot's barriers.
struct StoredTurn {
  int slot = 0;
  unsigned phase = 0;
  constexpr void skip(int count, int slots) {
    slot += count;
    if (slot >= slots) {
      slot -= slots;
      phase ^= 1;
    }
  }
};

// Where a vector of 8 values lies in a widened tile: panels of 64 columns, rows of 128 bytes, swizzled.
constexpr int widened_place(int row, int vector, int panel_size) {
  return vector / 8 * panel_size + row * 128 + (vector % 8 ^ row % 8) * 16;
}

// A row in registers, as the routines of formats read it (common/device/kv/widen.h). All bytes are known at compile
// time.
template <int kVectors>
struct RegisterRow {
  unsigned words[4 * kVectors];
  [[gnu::always_inline]] constexpr unsigned word(int byte) const {
    const unsigned first = words[byte / 4];
    return byte % 4 == 0 ? first : first >> 16 | words[byte / 4 + 1] << 16;
  }
  [[gnu::always_inline]] constexpr unsigned half(int byte) const { return words[byte / 4] >> byte % 4 * 8 & 0xffffu; }
};

}  // namespace flashport::cuda_attention
