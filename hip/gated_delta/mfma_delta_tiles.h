// The tile verbs of the chunked gated delta rule on MFMA.
#pragma once

#include "hip/gated_delta/mfma_chain_tiles.h"
#include "hip/gated_delta/mfma_prepare_tiles.h"
