// The tile verbs of the chunked gated delta rule on WMMA.
#pragma once

#include "hip/gated_delta/wmma_chain_tiles.h"
#include "hip/gated_delta/wmma_prepare_tiles.h"
