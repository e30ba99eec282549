// The element type of K and V as a loader policy: how stored rows in shared memory become the A operands of mma.sync,
// 16 keys x 16 dims of K and, transposed, 16 columns x 16 keys of V. All come by ldmatrix: 16-bit caches as they are,
// byte caches (fp8, q8_0) in the order of lane_maps.h and widened to fp16 in registers.
//
// A q8_0 value widens to (int8 + 128) * 2^-24, the fp16 number whose bits are that byte: nothing but a move. What is
// too much is taken off by products with kMinus128, and scales are not applied here (tiles.h).
#pragma once

#include <cuda_fp8.h>

#include "cuda/target/kv_pipeline.h"
#include "cuda/target/lane_maps.h"

namespace flashport::FLASHPORT_TARGET {

// Two e4m3 values in the low and two in the high half of `four`, exactly, as fp16.
FLASHPORT_DEVICE void widen_fp8(unsigned& low, unsigned& high, unsigned four) {
  asm("{\n"
      ".reg .b16 two, other_two;\n"
      "mov.b32 {two, other_two}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, two;\n"
      "cvt.rn.f16x2.e4m3x2 %1, other_two;\n"
      "}"
      : "=r"(low), "=r"(high)
      : "r"(four));
}

constexpr float kInt8Unit = 0x1p24f;         // what widened values are to be multiplied by
constexpr unsigned kMinus128 = 0x80808080u;  // two of them, widened

template <DecodeConfig kCfg>
struct KeyOperand {
  static constexpr KvFormat kFormat = kCfg.shape.kv;
  using Layout = typename KvTiles<kCfg>::Keys;

  FLASHPORT_DEVICE explicit KeyOperand(int lane) {
    for (int block = 0; block < kSelectors; ++block) {
      selectors_[block] = q8_0_selector(block, lane % 4);
      asm volatile("" : "+r"(selectors_[block]));  // once, not for each leaf
    }
  }

  // Keys key .. key + 15, 16 dims of `group` of 32 in each of two steps.
  FLASHPORT_DEVICE void load(unsigned (&a)[2][4], const char* tile, int lane, int key, int group) const {
    const int row = key + lane % 16;
    const int unit = lane / 16 * 16;
    if constexpr (!is_byte_format(kFormat)) {
      for (int step = 0; step < 2; ++step) ldmatrix_x4(a[step], tile + Layout::at(row, unit, 64 * group + 32 * step));
    } else if constexpr (kFormat == KvFormat::kFp8E4M3) {
      unsigned raw[4];
      ldmatrix_x4(raw, tile + Layout::at(row, unit, 32 * group));
      for (int i = 0; i < 4; ++i) widen_fp8(a[i / 2][i % 2], a[i / 2][i % 2 + 2], raw[i]);
    } else {
      const char* first = tile + row * Layout::kPitch + q8_0_unit(group) * 16;
      unsigned head[2], rest[4];
      ldmatrix_x2(head, first);
      ldmatrix_x4(rest, first + 16 + unit);
      for (int half = 0; half < 2; ++half) {
        widen(a[0][half], a[0][half + 2], __byte_perm(head[half], rest[half + 2], selectors_[group % kSelectors]));
        widen(a[1][half], a[1][half + 2], rest[half]);
      }
    }
  }

  // The scale of a key's q8_0 block.
  FLASHPORT_DEVICE static float scale(const char* tile, int key, int block) {
    return to_float(*reinterpret_cast<const Half*>(tile + key * Layout::kPitch + block * 34));
  }

 private:
  FLASHPORT_DEVICE static void widen(unsigned& low, unsigned& high, unsigned four) {
    const unsigned biased = four ^ 0x80808080u;
    low = __byte_perm(biased, 0, 0x4140);
    high = __byte_perm(biased, 0, 0x4342);
  }

  static constexpr int kBlocks = kCfg.shape.head_dim_qk / 32;
  static constexpr int kSelectors = kFormat != KvFormat::kQ8_0 ? 0 : kBlocks < 8 ? kBlocks : 8;
  unsigned selectors_[kSelectors + 1];  // one more, because none is no array
};

template <DecodeConfig kCfg>
struct ValueOperand {
  static constexpr KvFormat kFormat = kCfg.shape.kv;
  using Layout = typename KvTiles<kCfg>::Values;
  static constexpr int kTiles = is_byte_format(kFormat) ? 2 : 1;  // of 16 columns, loaded together

  // Keys key .. key + 15, columns of `group` of kTiles tiles. For q8_0, `scale` has those of keys 2 c, 2 c + 1 and
  // 2 c + 8, 2 c + 9.
  FLASHPORT_DEVICE static void load(unsigned (&a)[kTiles][4], unsigned (&scale)[2], const char* tile, int lane, int key,
                                    int group) {
    const int row = key + lane % 16;
    const int unit = lane / 16 * 16;
    if constexpr (!is_byte_format(kFormat)) {
      ldmatrix_x4_trans(a[0], tile + Layout::at(key + lane / 16 * 8 + lane % 8, lane / 8 % 2 * 16, 32 * group));
    } else if constexpr (kFormat == KvFormat::kFp8E4M3) {
      unsigned raw[4];
      ldmatrix_x4_trans(raw, tile + Layout::at(row, unit, 32 * group));
      for (int i = 0; i < 4; ++i) {
        unsigned* pairs = &a[i / 2][i % 2 * 2];
        widen_fp8(pairs[0], pairs[1], __byte_perm(raw[i], 0, 0x3120));
      }
    } else {
      const char* first = tile + row * Layout::kPitch + q8_0_unit(group) * 16;
      unsigned head[2], rest[4];
      ldmatrix_x2_trans(head, first);
      ldmatrix_x4_trans(rest, first + 16 + unit);
      const int in_turn = group % 8;  // the scale is the unit's value in place 2 in_turn, those of the block follow it
      for (int half = 0; half < 2; ++half) {
        scale[half] = __shfl_sync(~0u, head[half], 4 * in_turn + lane % 4);
        widen(a[0][2 * half], a[0][2 * half + 1], lane / 4 > in_turn ? head[half] : rest[half + 2]);
        widen(a[1][2 * half], a[1][2 * half + 1], rest[half]);
      }
    }
  }

 private:
  FLASHPORT_DEVICE static void widen(unsigned& low, unsigned& high, unsigned four) {
    const unsigned biased = four ^ 0x80808080u;
    low = __byte_perm(biased, 0, 0x4240);
    high = __byte_perm(biased, 0, 0x4341);
  }
};

}  // namespace flashport::FLASHPORT_TARGET
