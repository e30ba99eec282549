// x86 with AVX-512 and AMX's tile registers for bf16.
#pragma once

#include "cpu/arch/amx.h"

#define FLASHPORT_ATTENTION_TUNING_HEADER "cpu/tuning/attention/cpu.h"
#define FLASHPORT_ATTENTION_PRODUCTS_HEADER "cpu/attention/amx_products.h"
#define FLASHPORT_ATTENTION_TILES_HEADER "cpu/attention/tiles.h"
