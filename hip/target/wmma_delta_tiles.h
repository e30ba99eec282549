// The tile verbs of the chunked gated delta rule on WMMA.
#pragma once

#include "hip/target/wmma_chain_tiles.h"
#include "hip/target/wmma_prepare_tiles.h"
