// How a warp reads the biases of its scores that producers have left in shared memory (BiasMemory).
//
// As in a sum of wgmma: lane 4 g + c has rows g and g + 8, and of each eight keys of a tile keys 2 c and 2 c + 1.
#pragma once

#include "cuda/attention/memory.h"

namespace flashport::FLASHPORT_TARGET::attention {

// The low (0) or high (1) of two values of the math type.
template <MathType kMath>
FLASHPORT_DEVICE float wide(unsigned two, int half) {
  if constexpr (kMath == MathType::kBf16) return __uint_as_float(half == 0 ? two << 16 : two & 0xffff0000u);
  return __half2float(__ushort_as_half(static_cast<unsigned short>(half == 0 ? two : two >> 16)));
}

template <AttentionConfig kCfg>
class BiasReader {
  using Memory = BiasMemory<kCfg>;
  static constexpr MathType kMath = kCfg.shape.math;
  static constexpr int kKeys = kCfg.tuning.keys, kSlots = 2;
  static constexpr int kPartKeys = kBiasPartBytes / 2, kPartFloats = kBiasPartBytes / 4;
  static constexpr int kParts = kKeys / kPartKeys;  // of a tile, of 16 bits
  static_assert(kKeys % kPartKeys == 0);

 public:
  FLASHPORT_DEVICE explicit BiasReader(int group) : group_(group) {}

  // f(eight, i, bias) for register i of each eight keys of a tile, by all lanes of a warpgroup. `row_at`: where biases
  // of the lane's first row begin, in elements. What lies after the last key and query is any number.
  template <class F>
  FLASHPORT_DEVICE void for_each(Memory& memory, const BiasParams& bias, std::int64_t row_at, F&& f) {
    if (bias.has_map != 0) {
      unsigned two[kKeys / 8][kSlots];
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        load_box(await(memory), &two[part * (kPartKeys / 8)]);
        fence_async_proxy();
        release(memory);
      }
      for_each_of_pairs(two, 0, f);
    } else if (bias.dtype == DType::kFloat32) {
#pragma unroll
      for (int part = 0; part < 2 * kParts; ++part) {
        float one[kPartFloats / 8][4];
        load_floats(await(memory), bias, row_at, one);
        release(memory);
#pragma unroll
        for (int eight = 0; eight < kPartFloats / 8; ++eight) {
#pragma unroll
          for (int i = 0; i < 4; ++i) f(part * (kPartFloats / 8) + eight, i, one[eight][i]);
        }
      }
    } else {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        unsigned two[kPartKeys / 8][kSlots];
        load_pairs(await(memory), bias, row_at, two);
        release(memory);
        for_each_of_pairs(two, part * (kPartKeys / 8), f);
      }
    }
  }

 private:
  FLASHPORT_DEVICE static int lane() { return static_cast<int>(threadIdx.x) % kWaveSize; }
  // The warp's first row of a stage.
  FLASHPORT_DEVICE static int first_row() { return static_cast<int>(threadIdx.x) % kWarpgroup / kWaveSize * 16; }

  FLASHPORT_DEVICE const unsigned char* await(Memory& memory) const {
    mbarrier_wait(&memory.barriers[group_][pipe_.stage].full, pipe_.phase);
    return memory.x[group_].stages[pipe_.stage].rows;
  }
  FLASHPORT_DEVICE void release(Memory& memory) {
    mbarrier_arrive_wave(&memory.barriers[group_][pipe_.stage].empty);
    pipe_.next();
  }

  // Each ldmatrix has rows 0 to 7 and 8 to 15 of two vectors.
  FLASHPORT_DEVICE static void load_box(const unsigned char* rows, unsigned (*two)[kSlots]) {
    const unsigned char* row = rows + (first_row() + lane() % 16) * 128;
#pragma unroll
    for (int i = 0; i < kPartKeys / 16; ++i) {
      unsigned four[4];
      ldmatrix_x4(four, row + ((2 * i + lane() / 16) ^ lane() % 8) * 16);
#pragma unroll
      for (int at = 0; at < 4; ++at) two[2 * i + at / 2][at % 2] = four[at];
    }
  }

  // How many bytes after the place of a row its first bias begins: the low bits of its address, found anew for each
  // tile.
  template <class T>
  FLASHPORT_DEVICE static unsigned shift(const BiasParams& bias, std::int64_t row_at, int slot) {
    const auto data = static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(bias.data));
    const unsigned at = static_cast<unsigned>(row_at) + 8 * slot * static_cast<unsigned>(bias.stride_row);
    return static_cast<unsigned>(recompute(static_cast<int>(data + at * sizeof(T)))) % 16;
  }
  FLASHPORT_DEVICE static const unsigned char* place(const unsigned char* rows, int slot) {
    return rows + (first_row() + lane() / 4 + 8 * slot) * kBiasPitch;
  }
  FLASHPORT_DEVICE static unsigned word(const unsigned char* at) { return *reinterpret_cast<const unsigned*>(at); }

  // Pairs of rows that begin inside a word come from two.
  FLASHPORT_DEVICE static void load_pairs(const unsigned char* rows, const BiasParams& bias, std::int64_t row_at,
                                          unsigned (&two)[kPartKeys / 8][kSlots]) {
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      const unsigned offset = shift<std::uint16_t>(bias, row_at, slot);
      const unsigned char* row = place(rows, slot) + offset / 4 * 4 + 4 * (lane() % 4);
      const unsigned pair = offset % 4 != 0 ? 0x5432 : 0x3210;
#pragma unroll
      for (int eight = 0; eight < kPartKeys / 8; ++eight) {
        two[eight][slot] = __byte_perm(word(row + 16 * eight), word(row + 16 * eight + 4), pair);
      }
    }
  }

  FLASHPORT_DEVICE static void load_floats(const unsigned char* rows, const BiasParams& bias, std::int64_t row_at,
                                           float (&one)[kPartFloats / 8][4]) {
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      const unsigned char* row = place(rows, slot) + shift<float>(bias, row_at, slot) + 8 * (lane() % 4);
#pragma unroll
      for (int eight = 0; eight < kPartFloats / 8; ++eight) {
#pragma unroll
        for (int i = 0; i < 2; ++i) one[eight][2 * slot + i] = __uint_as_float(word(row + 32 * eight + 4 * i));
      }
    }
  }

  template <int kEights, class F>
  FLASHPORT_DEVICE static void for_each_of_pairs(const unsigned (&two)[kEights][kSlots], int first, F& f) {
#pragma unroll
    for (int eight = 0; eight < kEights; ++eight) {
#pragma unroll
      for (int i = 0; i < 4; ++i) f(first + eight, i, wide<kMath>(two[eight][i / 2], i % 2));
    }
  }

  const int group_;
  PipelineState<Memory::kStages> pipe_;
};

}  // namespace flashport::FLASHPORT_TARGET::attention
