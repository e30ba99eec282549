// The tiles of a chunk of the gated delta rule that the waves of a block share in LDS, and their copies to LDS through
// registers. Values are not among them: each wave has its own part of V.
#pragma once

#include <type_traits>

#include "common/device/core/scalar_access.h"
#include "common/device/gated_delta/sequence.h"
#include "hip/arch/global_memory.h"
#include FLASHPORT_GATED_DELTA_TUNING_HEADER

namespace flashport::FLASHPORT_TARGET::gated_delta {

using Eight = unsigned __attribute__((ext_vector_type(4)));  // a vector of eight 16-bit values

// The eight 16-bit values from offset `at` on, or one; zeros unless `live`.
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

// Loads an element of a state, 0 unless `live`, as two halves, so that no type needs a branch: each path of a branch
// would have registers of its own for the tile that receives the element. Several loads are in flight before the first
// element is widened.
FLASHPORT_DEVICE Element load_state_element(const void* data, DType dtype, std::int64_t at, bool live) {
  const int halves = dtype == DType::kFloat32 ? 2 : 1;
  return {load_one(data, at * halves, live), load_one(data, at * halves + halves - 1, live)};
}
FLASHPORT_DEVICE float widen_state_element(Element x, DType dtype) {
  const unsigned low = x.low, high = x.high;
  const float narrow =
      dtype == DType::kBFloat16 ? __builtin_bit_cast(float, low << 16) : to_float(__builtin_bit_cast(Half, x.low));
  return dtype == DType::kFloat32 ? __builtin_bit_cast(float, low | high << 16) : narrow;
}

// A lower triangular matrix [64, 64] of 16-bit values: its sub-blocks of 16 x 16 up to the diagonal's, row by row.
inline constexpr int kLowerSubBlocks = 10, kSubBlockValues = 16 * 16;
constexpr int lower_sub_block(int row, int column) { return row * (row + 1) / 2 + column; }

template <GatedDeltaChunkConfig kCfg>
struct ChunkMemory {
  static constexpr int kPitch = kCfg.head_dim_k + 8;  // rows begin in other banks
  alignas(16) std::uint16_t keys[kChunkTokens * kPitch];
  alignas(16) std::uint16_t lower[2][kLowerSubBlocks * kSubBlockValues];  // the inverse, and P
  alignas(16) ChunkFactors factors;
};

// Stores the inverse in the workspace, except the sub-blocks above the diagonal; pack(x, y) rounds two floats.
template <int kThreads, class Memory, class Pack>
FLASHPORT_DEVICE void store_inverse(const Memory& memory, std::uint16_t* to, int thread, const Pack& pack) {
  using Floats = float __attribute__((ext_vector_type(4)));
#pragma unroll
  for (int i = 0; i < kChunkTokens * 8 / kThreads; ++i) {
    const int row = i * (kThreads / 8) + thread / 8, vector = thread % 8;
    if (vector / 2 > row / 16) continue;
    const auto* eight = reinterpret_cast<const Floats*>(memory.inverse_at(row, vector * 8));
    const Floats low = eight[0], high = eight[1];
    *reinterpret_cast<Eight*>(to + row * kChunkTokens + vector * 8) =
        Eight{pack(low[0], low[1]), pack(low[2], low[3]), pack(high[0], high[1]), pack(high[2], high[3])};
  }
}

// Copies a chunk's rows of keys or queries by all threads of a block, in two steps: begin() loads from memory, and
// store_shared() waits for the loads and stores to LDS.
template <GatedDeltaChunkConfig kCfg, int kThreads>
class RowCopies {
  static constexpr int kRowVectors = kCfg.head_dim_k / 8;
  static constexpr int kVectors = kChunkTokens * kRowVectors / kThreads;
  static_assert(kThreads % kRowVectors == 0);

 public:
  FLASHPORT_DEVICE void begin(const StridedRows& rows, std::int64_t at, int count, int keys, int thread) {
    const int first = thread / kRowVectors, key = thread % kRowVectors * 8;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int row = first + i * (kThreads / kRowVectors);
      vectors_[i] = load_eight(rows.data, at + row * rows.stride_token + key, row < count && key < keys);
    }
  }
  FLASHPORT_DEVICE void store_shared(std::uint16_t* to, int thread) const {
    const int first = thread / kRowVectors, key = thread % kRowVectors * 8;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int row = first + i * (kThreads / kRowVectors);
      *reinterpret_cast<Eight*>(to + row * ChunkMemory<kCfg>::kPitch + key) = vectors_[i];
    }
  }

 private:
  Eight vectors_[kVectors];
};

// Copies the prepare kernel's results for a chunk, in the same two steps.
template <int kThreads>
class WorkspaceCopies {
  static constexpr int kMatrixVectors = kLowerSubBlocks * kSubBlockValues / 8;
  static constexpr int kVectors = (2 * kMatrixVectors + kThreads - 1) / kThreads;
  static constexpr int kFactorVectors = sizeof(ChunkFactors) / 16;
  static_assert(kFactorVectors <= kThreads);

 public:
  FLASHPORT_DEVICE void begin(const ChunkWorkspace& workspace, std::int64_t index, int thread) {
    const auto* inverses = static_cast<const char*>(scalar_address(workspace.inverses));
    const std::int64_t to_scores = static_cast<const char*>(scalar_address(workspace.scores)) - inverses;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int vector = thread + i * kThreads, in_matrix = vector % kMatrixVectors;
      const int sub_block = in_matrix / 32, sub_block_row = sub_block < 1   ? 0
                                                            : sub_block < 3 ? 1
                                                            : sub_block < 6 ? 2
                                                                            : 3;
      const int row = sub_block_row * 16 + in_matrix / 2 % 16;
      const int column = (sub_block - lower_sub_block(sub_block_row, 0)) * 16 + in_matrix % 2 * 8;
      const char* from = inverses + (vector < kMatrixVectors ? 0 : to_scores);
      vectors_[i] = load_eight(from, (index * kChunkTokens + row) * kChunkTokens + column, vector < 2 * kMatrixVectors);
    }
    factors_ = load_eight(workspace.factors + index, thread * 8, thread < kFactorVectors);
  }
  template <class Memory>
  FLASHPORT_DEVICE void store_shared(Memory& memory, int thread) const {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int vector = thread + i * kThreads;
      if (vector < 2 * kMatrixVectors) *reinterpret_cast<Eight*>(memory.lower[0] + vector * 8) = vectors_[i];
    }
    if (thread < kFactorVectors) reinterpret_cast<Eight*>(&memory.factors)[thread] = factors_;
  }

 private:
  Eight vectors_[kVectors], factors_;
};

}  // namespace flashport::FLASHPORT_TARGET::gated_delta
