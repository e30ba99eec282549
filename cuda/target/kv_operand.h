// The element type of K and V as a loader policy: how stored rows in shared memory become the A operands of mma.sync,
// 16 keys x 16 dims of K and, transposed, 16 columns x 16 keys of V.
//
// 16-bit caches are read by ldmatrix in natural order. Byte caches (fp8, q8_0) are widened to fp16 in registers, and
// the order inside a group of 16 changes: for keys, dims 4 c + {0, 1, 2, 3} sit where k = 2c, 2c + 1, 2c + 8, 2c + 9 is
// due (the query operand is loaded alike); for values, columns 2 g and 2 g + 1 sit in rows g and g + 8.
#pragma once

#include <cuda_fp8.h>

#include "cuda/target/kv_pipeline.h"

namespace flashport::FLASHPORT_TARGET {

constexpr bool is_byte_format(KvFormat format) { return format == KvFormat::kFp8E4M3 || format == KvFormat::kQ8_0; }

// Two e4m3 values in the low 16 bits, exactly, as fp16.
FLASHPORT_DEVICE unsigned widen_fp8(unsigned two) {
  unsigned wide;
  asm("{ .reg .b16 low; cvt.u16.u32 low, %1; cvt.rn.f16x2.e4m3x2 %0, low; }" : "=r"(wide) : "r"(two));
  return wide;
}

// Two int8 (bytes `selector` of `four`, biased by 128) as fp16, exactly: 0x6400 is 1024.
template <unsigned kSelector>
FLASHPORT_DEVICE __half2 widen_int8(unsigned four_biased) {
  const unsigned wide = __byte_perm(four_biased, 0x64646464u, kSelector);
  return __hsub2(reinterpret_cast<const __half2&>(wide), __half2half2(__ushort_as_half(0x6480)));
}

FLASHPORT_DEVICE unsigned bits(__half2 x) { return reinterpret_cast<const unsigned&>(x); }

// The q8_0 block that holds `dim` of a row: an fp16 scale, then 32 int8.
FLASHPORT_DEVICE const char* q8_0_block(const char* row, int dim) { return row + dim / 32 * 34; }
FLASHPORT_DEVICE Half q8_0_scale(const char* block) { return *reinterpret_cast<const Half*>(block); }
FLASHPORT_DEVICE unsigned load_u16(const char* from) { return *reinterpret_cast<const std::uint16_t*>(from); }

template <DecodeConfig kCfg>
struct KeyOperand {
  static constexpr KvFormat kFormat = kCfg.shape.kv;
  using Layout = typename KvTiles<kCfg>::Keys;

  // Keys key .. key + 15, dims of `step`.
  FLASHPORT_DEVICE static void load(unsigned (&a)[4], const char* tile, int lane, int key, int step) {
    if constexpr (!is_byte_format(kFormat)) {
      ldmatrix_x4(a, tile + Layout::at(key + lane % 16, lane / 16 * 16, 32 * step));
    } else {
      four_dims(a[0], a[2], tile, key + lane / 4, 16 * step + lane % 4 * 4);
      four_dims(a[1], a[3], tile, key + lane / 4 + 8, 16 * step + lane % 4 * 4);
    }
  }

 private:
  FLASHPORT_DEVICE static void four_dims(unsigned& low, unsigned& high, const char* tile, int key, int dim) {
    if constexpr (kFormat == KvFormat::kFp8E4M3) {
      const unsigned four = *reinterpret_cast<const unsigned*>(tile + Layout::offset(key, dim));
      low = widen_fp8(four);
      high = widen_fp8(four >> 16);
    } else {
      const char* block = q8_0_block(tile + key * Layout::kPitch, dim);
      const __half2 d = __half2half2(q8_0_scale(block));
      const char* at = block + 2 + dim % 32;
      const unsigned four = (load_u16(at) | load_u16(at + 2) << 16) ^ 0x80808080u;
      low = bits(__hmul2(widen_int8<0x4140>(four), d));
      high = bits(__hmul2(widen_int8<0x4342>(four), d));
    }
  }
};

template <DecodeConfig kCfg>
struct ValueOperand {
  static constexpr KvFormat kFormat = kCfg.shape.kv;
  using Layout = typename KvTiles<kCfg>::Values;
  static constexpr int kPitch = Layout::kPitch;

  // The column, of 16, in rows g (half 0) and g + 8 (half 1) of the operand.
  FLASHPORT_DEVICE static constexpr int column(int g, int half) {
    return is_byte_format(kFormat) ? 2 * g + half : g + 8 * half;
  }

  // Columns col .. col + 15, keys key .. key + 15.
  FLASHPORT_DEVICE static void load(unsigned (&a)[4], const char* tile, int lane, int key, int col) {
    if constexpr (!is_byte_format(kFormat)) {
      ldmatrix_x4_trans(a, tile + Layout::at(key + lane / 16 * 8 + lane % 8, lane / 8 % 2 * 16, 2 * col));
    } else if constexpr (kFormat == KvFormat::kFp8E4M3) {
      // A 16-bit unit holds two columns of one key: transposed, a register has two keys and both columns.
      unsigned raw[2];
      asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                   : "=r"(raw[0]), "=r"(raw[1])
                   : "r"(shared_address(tile + Layout::offset(key + lane % 16, col)))
                   : "memory");
      for (int half = 0; half < 2; ++half) {
        a[2 * half] = widen_fp8(__byte_perm(raw[half], 0, 0x0020));
        a[2 * half + 1] = widen_fp8(__byte_perm(raw[half], 0, 0x0031));
      }
    } else {
      const int at = 2 + col % 32 + lane / 4 * 2;
      for (int half = 0; half < 2; ++half) {
        const char* block = q8_0_block(tile + (key + 8 * half + lane % 4 * 2) * kPitch, col);
        const __half2 d = __halves2half2(q8_0_scale(block), q8_0_scale(block + kPitch));
        const unsigned four = (load_u16(block + at) | load_u16(block + kPitch + at) << 16) ^ 0x80808080u;
        a[2 * half] = bits(__hmul2(widen_int8<0x4240>(four), d));
        a[2 * half + 1] = bits(__hmul2(widen_int8<0x4341>(four), d));
      }
    }
  }
};

}  // namespace flashport::FLASHPORT_TARGET
