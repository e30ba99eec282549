// Hopper as cuda/arch/sm90a.h has it, on machine.h. Its folder comes before the repository's among those of headers.
#pragma once

#include "cuda/arch/block.h"

#define FLASHPORT_WORDS_HEADER "cuda/arch/words.h"
#define FLASHPORT_DECODE_TUNING_HEADER "cuda/tuning/decode/sm90a.h"
#define FLASHPORT_ATTENTION_TUNING_HEADER "cuda/tuning/attention/sm90a.h"
#define FLASHPORT_DECODE_TILES_HEADER "cuda/decode/wgmma_tiles.h"
