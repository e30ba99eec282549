// The tile verbs of the chunked gated delta rule.
#pragma once

#include "cuda/gated_delta/chain_tiles.h"
#include "cuda/gated_delta/prepare_tiles.h"
