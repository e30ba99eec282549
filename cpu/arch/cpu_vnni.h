// x86 with AVX-512 and VNNI: products of bytes and of 16-bit numbers with sums in 32 bits. GCC
// spends an instruction on broadcasting what all lanes are multiplied by; read by the product it costs none.
#pragma once

#include "cpu/arch/avx512.h"

#define FLASHPORT_DECODE_TUNING_HEADER "cpu/tuning/decode/cpu.h"
#define FLASHPORT_DECODE_PRODUCTS_HEADER "cpu/decode/code_products.h"
#define FLASHPORT_DECODE_TILES_HEADER "cpu/decode/tiles.h"

namespace flashport::FLASHPORT_TARGET {

// Each element plus the products of its four unsigned bytes of `codes` with the signed ones at `four`.
FLASHPORT_DEVICE __m512i add_byte_products(__m512i sums, __m512i codes, const std::int8_t (&four)[4]) {
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sums) : "v"(codes), "m"(four));
  return sums;
}
// Each element plus the products of its two signed 16-bit numbers of `codes` with those at `two`.
FLASHPORT_DEVICE __m512i add_pair_products(__m512i sums, __m512i codes, const std::int16_t (&two)[2]) {
  asm("vpdpwssd %2%{1to16%}, %1, %0" : "+v"(sums) : "v"(codes), "m"(two));
  return sums;
}

}  // namespace flashport::FLASHPORT_TARGET
