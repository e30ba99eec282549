// The tile verbs of the chunked gated delta rule.
#pragma once

#include "cuda/target/chain_tiles.h"
#include "cuda/target/prepare_tiles.h"
