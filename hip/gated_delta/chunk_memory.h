// What the waves of a block share of a chunk of the gated delta rule, and its way to LDS through registers. Values do
// not come here: each wave has its own part of V.
#pragma once

#include <type_traits>

#include "common/device/core/scalar_access.h"
#include "common/device/gated_delta/sequence.h"
#include "hip/arch/global_memory.h"
#include FLASHPORT_GATED_DELTA_TUNING_HEADER

namespace flashport::FLASHPORT_TARGET::gated_delta {

using Eight = unsigned __attribute__((ext_vector_type(4)));  // 16-bit values

// The eight 16-bit values from element `at` on, or one; zeros unless `live`.
FLASHPORT_DEVICE Eight load_eight(const void* data, std::int64_t at, bool live) {
  return load_words<4>(live ? (GlobalBytes)data + at * 2 : zero_row());
}
FLASHPORT_DEVICE std::uint16_t load_one(const void* data, std::int64_t at, bool live) {
  return load_half_word(live ? (GlobalBytes)data + at * 2 : zero_row());
}
template <MathType kMath>
FLASHPORT_DEVICE float widen_one(std::uint16_t x) {
  using Element = std::conditional_t<kMath == MathType::kBf16, BFloat16, Half>;
  return to_float(__builtin_bit_cast(Element, x));
}

// An element of a state as it is loaded, 0 unless `live`: halves, so that no type needs a branch, whose paths would
// each have registers of their own for the tile that it is put into. Several are on their way before the first is
// widened.
FLASHPORT_DEVICE Element load_of_state(const void* data, DType dtype, std::int64_t at, bool live) {
  const int halves = dtype == DType::kFloat32 ? 2 : 1;
  return {load_one(data, at * halves, live), load_one(data, at * halves + halves - 1, live)};
}
FLASHPORT_DEVICE float widen_of_state(Element x, DType dtype) {
  const unsigned low = x.low, high = x.high;
  const float narrow =
      dtype == DType::kBFloat16 ? __builtin_bit_cast(float, low << 16) : to_float(__builtin_bit_cast(Half, x.low));
  return dtype == DType::kFloat32 ? __builtin_bit_cast(float, low | high << 16) : narrow;
}

// A lower triangular matrix [64, 64] of 16-bit values: blocks of 16 x 16 up to the diagonal's, row by row of blocks.
inline constexpr int kLowerBlocks = 10, kBlockValues = 16 * 16;
constexpr int lower_block(int row, int column) { return row * (row + 1) / 2 + column; }

template <GatedDeltaChunkConfig kCfg>
struct ChunkMemory {
  static constexpr int kPitch = kCfg.head_dim_k + 8;  // rows begin in other banks
  alignas(16) std::uint16_t keys[kChunkTokens * kPitch];
  alignas(16) std::uint16_t lower[2][kLowerBlocks * kBlockValues];  // the inverse, and P
  alignas(16) ChunkFactors factors;
};

// The inverse to the workspace, but for what lies above the diagonal's blocks; pack(x, y) is two floats rounded.
template <int kThreads, class Memory, class Pack>
FLASHPORT_DEVICE void store_inverse(const Memory& memory, std::uint16_t* to, int thread, const Pack& pack) {
  using Floats = float __attribute__((ext_vector_type(4)));
#pragma unroll
  for (int i = 0; i < kChunkTokens * 8 / kThreads; ++i) {
    const int row = i * (kThreads / 8) + thread / 8, unit = thread % 8;
    if (unit / 2 > row / 16) continue;
    const auto* eight = reinterpret_cast<const Floats*>(memory.inverse_at(row, unit * 8));
    const Floats low = eight[0], high = eight[1];
    *reinterpret_cast<Eight*>(to + row * kChunkTokens + unit * 8) =
        Eight{pack(low[0], low[1]), pack(low[2], low[3]), pack(high[0], high[1]), pack(high[2], high[3])};
  }
}

// Copies by all threads of a block, in two halves: from memory, and to LDS. Of a chunk's rows of keys or queries:
template <GatedDeltaChunkConfig kCfg, int kThreads>
class RowCopies {
  static constexpr int kRowUnits = kCfg.head_dim_k / 8;
  static constexpr int kUnits = kChunkTokens * kRowUnits / kThreads;
  static_assert(kThreads % kRowUnits == 0);

 public:
  FLASHPORT_DEVICE void begin(const StridedRows& rows, std::int64_t at, int count, int keys, int thread) {
    const int first = thread / kRowUnits, key = thread % kRowUnits * 8;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      const int row = first + i * (kThreads / kRowUnits);
      units_[i] = load_eight(rows.data, at + row * rows.stride_token + key, row < count && key < keys);
    }
  }
  FLASHPORT_DEVICE void land(std::uint16_t* to, int thread) const {
    const int first = thread / kRowUnits, key = thread % kRowUnits * 8;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      const int row = first + i * (kThreads / kRowUnits);
      *reinterpret_cast<Eight*>(to + row * ChunkMemory<kCfg>::kPitch + key) = units_[i];
    }
  }

 private:
  Eight units_[kUnits];
};

// The same of what the prepare kernel has left.
template <int kThreads>
class PreparedCopies {
  static constexpr int kMatrixUnits = kLowerBlocks * kBlockValues / 8;
  static constexpr int kUnits = (2 * kMatrixUnits + kThreads - 1) / kThreads;
  static constexpr int kFactorUnits = sizeof(ChunkFactors) / 16;
  static_assert(kFactorUnits <= kThreads);

 public:
  FLASHPORT_DEVICE void begin(const ChunkWorkspace& workspace, std::int64_t place, int thread) {
    const auto* transforms = static_cast<const char*>(scalar_address(workspace.transforms));
    const std::int64_t to_scores = static_cast<const char*>(scalar_address(workspace.scores)) - transforms;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      const int unit = thread + i * kThreads, of_matrix = unit % kMatrixUnits;
      const int block = of_matrix / 32, row_block = block < 1 ? 0 : block < 3 ? 1 : block < 6 ? 2 : 3;
      const int row = row_block * 16 + of_matrix / 2 % 16;
      const int column = (block - lower_block(row_block, 0)) * 16 + of_matrix % 2 * 8;
      const char* from = transforms + (unit < kMatrixUnits ? 0 : to_scores);
      units_[i] = load_eight(from, (place * kChunkTokens + row) * kChunkTokens + column, unit < 2 * kMatrixUnits);
    }
    factors_ = load_eight(workspace.factors + place, thread * 8, thread < kFactorUnits);
  }
  template <class Memory>
  FLASHPORT_DEVICE void land(Memory& memory, int thread) const {
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      const int unit = thread + i * kThreads;
      if (unit < 2 * kMatrixUnits) *reinterpret_cast<Eight*>(memory.lower[0] + unit * 8) = units_[i];
    }
    if (thread < kFactorUnits) reinterpret_cast<Eight*>(&memory.factors)[thread] = factors_;
  }

 private:
  Eight units_[kUnits], factors_;
};

}  // namespace flashport::FLASHPORT_TARGET::gated_delta
