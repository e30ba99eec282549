// The tile verbs of what a chunk of the gated delta rule needs of itself, on mma.sync: four warps, each with 16 tokens'
// rows of both products of queries and keys.
#pragma once

#include "cuda/target/panels.h"

namespace flashport::FLASHPORT_TARGET {

// What a lane takes of a row in triangular.h.
using LaneColumns = float4;
inline constexpr int kLaneColumns = 4;
inline constexpr int kTrianglePitch = kChunkTokens + 4;  // rows begin in other banks

FLASHPORT_DEVICE LaneColumns load_lane_columns(const float* from) { return *reinterpret_cast<const float4*>(from); }
FLASHPORT_DEVICE void store_lane_columns(float* to, LaneColumns x) { *reinterpret_cast<float4*>(to) = x; }
FLASHPORT_DEVICE LaneColumns multiply_add(float factor, LaneColumns x, LaneColumns sum) {
  return {fma_rn(factor, x.x, sum.x), fma_rn(factor, x.y, sum.y), fma_rn(factor, x.z, sum.z),
          fma_rn(factor, x.w, sum.w)};
}
// 1 in column `place`, else 0.
FLASHPORT_DEVICE LaneColumns unit_lane_columns(int place) {
  return {place == 0 ? 1.0f : 0.0f, place == 1 ? 1.0f : 0.0f, place == 2 ? 1.0f : 0.0f, place == 3 ? 1.0f : 0.0f};
}

inline constexpr int kPrepareThreads = 128;

template <GatedDeltaChunkConfig kCfg>
struct PrepareMemory {
  static constexpr int kPanels = kCfg.head_dim_k / kPanelColumns;
  Panels<kPanels> q, k;
  unsigned flag;
};

template <GatedDeltaChunkConfig kCfg>
class PrepareTiles {
  static constexpr MathType kMath = kCfg.math;
  static constexpr int kSteps = kCfg.head_dim_k / 16;
  using Memory = PrepareMemory<kCfg>;

 public:
  struct Gram {
    float c[8][4];  // tiles of 8 columns up to the diagonal's block of 16
  };

  FLASHPORT_DEVICE PrepareTiles(const GatedDeltaChunkParams& p, const Block& block, Memory& memory, int count)
      : p_(p), block_(block), memory_(memory), count_(count), first_row_(block.wave() * 16) {}

  FLASHPORT_DEVICE void load(const TokenRows& q, std::int64_t at_q, const TokenRows& k, std::int64_t at_k) const {
    copy_rows<kPrepareThreads>(memory_.q, q, at_q, count_, p_.head_dim_k, has_wide_rows(q), block_.thread());
    copy_rows<kPrepareThreads>(memory_.k, k, at_k, count_, p_.head_dim_k, has_wide_rows(k), block_.thread());
    await_copies();
    block_.sync();
  }

  // The diagonals of q q^T and k k^T, two threads a row.
  FLASHPORT_DEVICE void square_sums(float* queries, float* keys) const {
    const int row = block_.thread() / 2;
    float sums[2] = {};
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const auto& panels = side == 0 ? memory_.q : memory_.k;
#pragma unroll 4
      for (int i = 0; i < kCfg.head_dim_k / 16; ++i) {
        const int unit = 2 * i + block_.thread() % 2;
        const auto eight = *reinterpret_cast<const uint4*>(panels.x[unit / 8] + panel_place(row, unit % 8));
        for (const unsigned two : {eight.x, eight.y, eight.z, eight.w}) {
          const float2 x = unpack<kMath>(two);
          sums[side] = fma_rn(x.y, x.y, fma_rn(x.x, x.x, sums[side]));
        }
      }
      sums[side] += __shfl_xor_sync(~0u, sums[side], 1);
    }
    if (block_.thread() % 2 == 0) queries[row] = sums[0], keys[row] = sums[1];
  }

  FLASHPORT_DEVICE void multiply(Gram& keys, Gram& queries) const {
    keys = {}, queries = {};
    const int lane = block_.lane();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const auto at = [&](int row, int unit) { return panel_place(row, (2 * step + unit) % 8); };
      const std::uint16_t* k = memory_.k.x[step / 4];
      const std::uint16_t* q = memory_.q.x[step / 4];
      unsigned own_keys[4], own_queries[4];
      ldmatrix_x4(own_keys, k + at(first_row_ + lane % 16, lane / 16));
      ldmatrix_x4(own_queries, q + at(first_row_ + lane % 16, lane / 16));
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        if (16 * pair > first_row_) break;
        unsigned b[4];
        ldmatrix_x4(b, k + at(16 * pair + lane / 16 * 8 + lane % 8, lane / 8 % 2));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          mma<kMath>(keys.c[2 * pair + i], own_keys, b[2 * i], b[2 * i + 1]);
          mma<kMath>(queries.c[2 * pair + i], own_queries, b[2 * i], b[2 * i + 1]);
        }
      }
    }
  }

  // f(row, column, k k^T, q k^T, a) gives an element of P and sets one of A, in the blocks that the diagonal meets or
  // leaves on its upper side.
  template <class F>
  FLASHPORT_DEVICE void store_lower(void* scores, std::int64_t place, const Gram& keys, const Gram& queries, const F& f,
                                    float* a) const {
    auto* to = static_cast<std::uint16_t*>(scores) + place * kChunkTokens * kChunkTokens;
#pragma unroll
    for (int tile = 0; tile < 8; ++tile) {
      if (tile / 2 * 16 > first_row_) break;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = first_row_ + block_.lane() / 4 + 8 * half, column = 8 * tile + block_.lane() % 4 * 2;
        float two[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          two[i] = f(row, column + i, keys.c[tile][2 * half + i], queries.c[tile][2 * half + i],
                     a[row * kTrianglePitch + column + i]);
        }
        *reinterpret_cast<unsigned*>(to + row * kChunkTokens + column) = pack<kMath>(two[0], two[1]);
      }
    }
  }
  FLASHPORT_DEVICE void store_transform(void* transforms, std::int64_t place, const float* inverse) const {
    auto* to = static_cast<std::uint16_t*>(transforms) + place * kChunkTokens * kChunkTokens;
    for (int i = block_.thread(); i < kChunkTokens * 8; i += block_.threads()) {
      const int row = i / 8, unit = i % 8;
      if (unit / 2 > row / 16) continue;
      unsigned two[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int column = unit * 8 + 2 * j;
        const float* from = inverse + row * kTrianglePitch + column;
        two[j] = pack<kMath>(column <= row ? from[0] : 0.0f, column + 1 <= row ? from[1] : 0.0f);
      }
      *reinterpret_cast<uint4*>(to + row * kChunkTokens + unit * 8) = make_uint4(two[0], two[1], two[2], two[3]);
    }
  }

 private:
  const GatedDeltaChunkParams& p_;
  const Block& block_;
  Memory& memory_;
  int count_, first_row_;
};

}  // namespace flashport::FLASHPORT_TARGET
