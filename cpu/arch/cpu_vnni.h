// x86 with AVX-512 and VNNI: products of bytes, and of 16-bit numbers, with sums in 32 bits.
#pragma once

#include "cpu/arch/avx512.h"

#define FLASHPORT_DECODE_TUNING_HEADER "cpu/tuning/decode/cpu.h"
#define FLASHPORT_DECODE_PRODUCTS_HEADER "cpu/decode/code_products.h"
#define FLASHPORT_DECODE_TILES_HEADER "cpu/decode/tiles.h"

namespace flashport::FLASHPORT_TARGET {

// Each element plus the products of its four unsigned bytes of `codes` with the signed ones at `four`. GCC would spend
// an instruction on broadcasting these; read by the product they cost none.
FLASHPORT_DEVICE __m512i add_byte_products(__m512i sums, __m512i codes, const std::int8_t (&four)[4]) {
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sums) : "v"(codes), "m"(four));
  return sums;
}

}  // namespace flashport::FLASHPORT_TARGET
