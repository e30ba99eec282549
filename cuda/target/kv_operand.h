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

  // Keys key .. key + 15, 16 dims of `group` of 32 in each of two steps. Groups come one after the other: a q8_0
  // block ends in the unit where the next begins, and `unit` keeps it.
  FLASHPORT_DEVICE void load(unsigned (&a)[2][4], unsigned (&unit)[2], const char* tile, int lane, int key,
                             int group) const {
    const int row = key + lane % 16;
    const int byte = lane / 16 * 16;
    if constexpr (!is_byte_format(kFormat)) {
      for (int step = 0; step < 2; ++step) ldmatrix_x4(a[step], tile + Layout::at(row, byte, 64 * group + 32 * step));
    } else if constexpr (kFormat == KvFormat::kFp8E4M3) {
      unsigned raw[4];
      ldmatrix_x4(raw, tile + Layout::at(row, byte, 32 * group));
      for (int i = 0; i < 4; ++i) widen_fp8(a[i / 2][i % 2], a[i / 2][i % 2 + 2], raw[i]);
    } else {
      const char* first = tile + row * Layout::kPitch + q8_0_unit(group) * 16;
      if (group % 8 == 0) ldmatrix_x2(unit, first);
      unsigned next[4];
      ldmatrix_x4(next, first + 16 + byte);
      for (int half = 0; half < 2; ++half) {
        widen(a[0][half], a[0][half + 2], __byte_perm(unit[half], next[half + 2], selectors_[group % kSelectors]));
        widen(a[1][half], a[1][half + 2], next[half]);
        unit[half] = next[half + 2];
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

  // Keys key .. key + 15, columns of `group` of kTiles tiles. For q8_0, `scale` has the scales of keys 2 c, 2 c + 1 and
  // 2 c + 8, 2 c + 9, and groups come one after the other, as for keys; the wave's first has nothing in `unit` yet.
  FLASHPORT_DEVICE static void load(unsigned (&a)[kTiles][4], unsigned (&scale)[2], unsigned (&unit)[2],
                                    const char* tile, int lane, int key, int group, bool first_group) {
    const int row = key + lane % 16;
    const int byte = lane / 16 * 16;
    if constexpr (!is_byte_format(kFormat)) {
      ldmatrix_x4_trans(a[0], tile + Layout::at(key + lane / 16 * 8 + lane % 8, lane / 8 % 2 * 16, 32 * group));
    } else if constexpr (kFormat == KvFormat::kFp8E4M3) {
      unsigned raw[4];
      ldmatrix_x4_trans(raw, tile + Layout::at(row, byte, 32 * group));
      for (int i = 0; i < 4; ++i) {
        unsigned* pairs = &a[i / 2][i % 2 * 2];
        widen_fp8(pairs[0], pairs[1], __byte_perm(raw[i], 0, 0x3120));
      }
    } else {
      const char* first = tile + row * Layout::kPitch + q8_0_unit(group) * 16;
      if (first_group) ldmatrix_x2_trans(unit, first);
      unsigned next[4];
      ldmatrix_x4_trans(next, first + 16 + byte);
      const int in_turn = group % 8;  // lanes 4 in_turn + c have the scales in their part of the unit
      for (int half = 0; half < 2; ++half) {
        scale[half] = __shfl_sync(~0u, unit[half], 4 * in_turn + lane % 4);
        widen(a[0][2 * half], a[0][2 * half + 1], lane / 4 > in_turn ? unit[half] : next[half + 2]);
        widen(a[1][2 * half], a[1][2 * half + 1], next[half]);
        unit[half] = next[half + 2];
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
