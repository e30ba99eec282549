// x86 with AVX-512 and VNNI: products of bytes and of 16-bit numbers with sums in 32 bits.
#pragma once

#include "cpu/arch/avx512.h"

#define FLASHPORT_DECODE_TUNING_HEADER "cpu/tuning/decode/cpu.h"
#define FLASHPORT_DECODE_PRODUCTS_HEADER "cpu/decode/code_products.h"
#define FLASHPORT_DECODE_TILES_HEADER "cpu/decode/tiles.h"
