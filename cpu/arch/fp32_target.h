// The schedules and tiles of a CPU target that has all operations, computed in fp32.
#pragma once

#define FLASHPORT_DECODE_TUNING_HEADER "cpu/tuning/decode/cpu.h"
#define FLASHPORT_ATTENTION_TUNING_HEADER "cpu/tuning/attention/cpu.h"
#define FLASHPORT_GATED_DELTA_TUNING_HEADER "cpu/tuning/gated_delta/cpu.h"
#define FLASHPORT_ATTENTION_PRODUCTS_HEADER "cpu/attention/float_products.h"
#define FLASHPORT_ATTENTION_TILES_HEADER "cpu/attention/tiles.h"
#define FLASHPORT_DECODE_PRODUCTS_HEADER "cpu/decode/kv_products.h"
#define FLASHPORT_DECODE_TILES_HEADER "cpu/decode/tiles.h"
#define FLASHPORT_STATE_TILE_HEADER "cpu/gated_delta/state_tile.h"
#define FLASHPORT_DELTA_TILES_HEADER "cpu/gated_delta/delta_tiles.h"
