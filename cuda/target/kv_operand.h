// The element type of K and V as a loader policy: how a stored row in shared memory becomes the B operand of mma.sync.
//
//   KvOperand<format>::key(b, row, lane, step)      b for keys row.. (8 of them) and the 16 dims of k step `step`
//   KvOperand<format>::value(b, ...)                b for 16 keys and 16 columns: two tiles of 8
//
// 16-bit caches are read by ldmatrix in natural order. Byte caches (fp8, q8_0) are widened to fp16 in registers, and the
// order inside a group of 16 changes: for keys, dim 16 s + 4 c + {0, 1, 2, 3} sits where k = 2c, 2c + 1, 2c + 8, 2c + 9
// of the step is due (the query fragment is loaded alike); for values, tile e of a pair holds columns 2 n + e.
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

template <KvFormat kFormat>
struct ByteOperand;

template <>
struct ByteOperand<KvFormat::kFp8E4M3> {
  // Four consecutive values of one row as two registers.
  FLASHPORT_DEVICE static void key(unsigned& b0, unsigned& b1, const char* row, int dim) {
    const unsigned four = *reinterpret_cast<const unsigned*>(row + dim);
    b0 = widen_fp8(four);
    b1 = widen_fp8(four >> 16);
  }
};

template <>
struct ByteOperand<KvFormat::kQ8_0> {
  static constexpr int kBlock = 34;  // fp16 scale, 32 int8

  FLASHPORT_DEVICE static Half scale(const char* row, int dim) {
    return *reinterpret_cast<const Half*>(row + dim / 32 * kBlock);
  }
  FLASHPORT_DEVICE static void key(unsigned& b0, unsigned& b1, const char* row, int dim) {
    const __half2 d = __half2half2(scale(row, dim));
    const char* at = row + dim / 32 * kBlock + 2 + dim % 32;
    const unsigned low = *reinterpret_cast<const std::uint16_t*>(at);
    const unsigned high = *reinterpret_cast<const std::uint16_t*>(at + 2);
    const unsigned four = (low | high << 16) ^ 0x80808080u;
    b0 = bits(__hmul2(widen_int8<0x4140>(four), d));
    b1 = bits(__hmul2(widen_int8<0x4342>(four), d));
  }
};

// B operands of two column tiles (even and odd columns of 16) and 16 keys, from two rows pairs of stored bytes.
template <DecodeConfig kCfg>
struct ValueOperand {
  static constexpr KvFormat kFormat = kCfg.shape.kv;
  static constexpr int kPitch = LeafSlot<kCfg>::kValuePitch;

  // b[2 e], b[2 e + 1]: tile e, keys key..key + 15, columns col..col + 15.
  FLASHPORT_DEVICE static void load(unsigned (&b)[4], const char* tile, int lane, int key, int col) {
    if constexpr (!is_byte_format(kFormat)) {
      ldmatrix_x4_trans(b, tile + (key + lane % 16) * kPitch + (col + lane / 16 * 8) * 2);
    } else if constexpr (kFormat == KvFormat::kFp8E4M3) {
      // A 16-bit unit holds two columns of one key: transposed, a register has two keys and both columns.
      unsigned raw[2];
      asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                   : "=r"(raw[0]), "=r"(raw[1])
                   : "r"(shared_address(tile + (key + lane % 16) * kPitch + col))
                   : "memory");
      for (int half = 0; half < 2; ++half) {
        b[half] = widen_fp8(__byte_perm(raw[half], 0, 0x0020));
        b[2 + half] = widen_fp8(__byte_perm(raw[half], 0, 0x0031));
      }
    } else {
      const int c = lane % 4;
      const int n = lane / 4;
      for (int half = 0; half < 2; ++half) {
        const char* row = tile + (key + 8 * half + 2 * c) * kPitch + col / 32 * ByteOperand<kFormat>::kBlock;
        const int at = 2 + col % 32 + 2 * n;
        const unsigned first = *reinterpret_cast<const std::uint16_t*>(row + at);
        const unsigned second = *reinterpret_cast<const std::uint16_t*>(row + kPitch + at);
        const __half2 d = __halves2half2(*reinterpret_cast<const Half*>(row),
                                         *reinterpret_cast<const Half*>(row + kPitch));
        const unsigned four = (first | second << 16) ^ 0x80808080u;
        b[half] = bits(__hmul2(widen_int8<0x4240>(four), d));
        b[2 + half] = bits(__hmul2(widen_int8<0x4341>(four), d));
      }
    }
  }
};

}  // namespace flashport::FLASHPORT_TARGET
