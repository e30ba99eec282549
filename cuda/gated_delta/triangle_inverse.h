// The inverse of a unit lower triangular matrix [64, 64] of floats in shared memory, by four warps. The diagonal's
// sub-blocks of 16 x 16 are inverted by forward substitution, a column a lane; inverses of 16 and of 32 rows are joined
// pairwise, [X11 0; X21 X22] with X21 = -X22 (A21 X11), on tensor cores. A product of floats is three products of tf32,
// high x high + high x low + low x high; the error against fp32 is what the low parts lose, some 2^-21.
#pragma once

#include "common/device/gated_delta/triangular.h"
#include "cuda/arch/mma.h"

namespace flashport::FLASHPORT_TARGET::gated_delta {

inline constexpr int kTrianglePitch = kChunkTokens + 4;  // rows begin in other banks

// x = high + low; `low` is truncated to tf32 where it is used.
FLASHPORT_DEVICE void split_tf32(float x, unsigned& high, unsigned& low) {
  high = __float_as_uint(x) & 0xffffe000u;
  low = __float_as_uint(x - __uint_as_float(high));
}

// A sub-block [16, 8 kTiles] of fp32 sums in a warp, laid out as C in mma.h.
template <int kTiles>
struct FloatSubBlock {
  float c[kTiles][4] = {};

  // += kSign left [16, kDepth] right [kDepth, 8 kTiles]
  template <int kDepth, int kSign = 1>
  FLASHPORT_DEVICE void add_product(const float* left, const float* right, int lane) {
    constexpr int kPitch = kTrianglePitch;
    const int g = lane / 4, c_of = lane % 4;
#pragma unroll
    for (int k = 0; k < kDepth; k += 8) {
      unsigned high[4], low[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        split_tf32(kSign * left[(g + i % 2 * 8) * kPitch + k + c_of + i / 2 * 4], high[i], low[i]);
      }
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        unsigned b_high[2], b_low[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          split_tf32(right[(k + c_of + i * 4) * kPitch + tile * 8 + g], b_high[i], b_low[i]);
        }
        mma_tf32(c[tile], low, b_high);
        mma_tf32(c[tile], high, b_low);
        mma_tf32(c[tile], high, b_high);
      }
    }
  }
  FLASHPORT_DEVICE void store(float* to, int lane) const {
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) {
      float* at = to + (lane / 4 + i % 2 * 8) * kTrianglePitch + i / 2 * 8 + lane % 4 * 2;
      *reinterpret_cast<float2*>(at) = make_float2(c[i / 2][i % 2 * 2], c[i / 2][i % 2 * 2 + 1]);
    }
  }
};

// x = (I + a)^-1 for the strictly lower part of `a`; rows of both are kTrianglePitch floats apart. Sub-blocks of x
// above the diagonal hold intermediate sums afterwards. The caller has a barrier before it and one after it.
FLASHPORT_DEVICE void invert_unit_lower(const Block& block, const float* a, float* x) {
  constexpr int kPitch = kTrianglePitch;
  const int lane = block.lane(), half = block.wave() / 2, side = block.wave() % 2;
  invert_diagonal_sub_blocks<kPitch>(block, a, x);
  block.sync();
  {  // pairs of 16 rows: this warp has 8 columns of pair `half`
    const int top = half * 32, middle = top + 16, columns = top + side * 8;
    float* x21 = x + middle * kPitch + columns;
    FloatSubBlock<1> product, joined;
    product.add_product<16>(a + middle * kPitch + top, x + top * kPitch + columns, lane);
    product.store(x21, lane);
    __syncwarp();
    joined.add_product<16, -1>(x + middle * (kPitch + 1), x21, lane);
    __syncwarp();
    joined.store(x21, lane);
  }
  block.sync();
  {  // the pair of 32 rows: this warp has 16 rows by 16 columns; A21 X11 is stored above the diagonal
    const int rows = half * 16, columns = side * 16;
    float* above = x + 32 + columns;
    FloatSubBlock<2> product, joined;
    product.add_product<16>(a + (32 + rows) * kPitch + 16, x + 16 * kPitch + columns, lane);
    if (side == 0)
      product.add_product<16>(a + (32 + rows) * kPitch, x, lane);  // the rest of X11's first 16 rows is zero
    product.store(above + rows * kPitch, lane);
    block.sync();
    joined.add_product<16, -1>(x + (32 + rows) * kPitch + 32, above, lane);
    if (half == 1) joined.add_product<16, -1>(x + (32 + rows) * kPitch + 48, above + 16 * kPitch, lane);
    joined.store(x + (32 + rows) * kPitch + columns, lane);
  }
}

}  // namespace flashport::FLASHPORT_TARGET::gated_delta
