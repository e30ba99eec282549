// The tile verbs of the chunked gated delta rule on MFMA.
#pragma once

#include "hip/target/mfma_chain_tiles.h"
#include "hip/target/mfma_prepare_tiles.h"
