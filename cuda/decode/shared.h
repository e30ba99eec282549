// What a team has in shared memory.
#pragma once

#include <type_traits>

#include "cuda/decode/block_shape.h"
#include "cuda/decode/block_widening.h"
#include "cuda/decode/early_range.h"
#include "cuda/decode/kv_pipeline.h"
#include "cuda/decode/new_keys.h"
#include "cuda/decode/row_factors.h"
#include "cuda/decode/segment_producer.h"

namespace flashport::FLASHPORT_TARGET::decode {

template <DecodeConfig kCfg>
struct DecodeShared : NewKeyStages<kCfg>, SegmentStages<kCfg> {
  KvRing<kCfg> ring;
  // What the waves that share query rows tell each other, of this turn and the one before. Eight rows are a unit of 16
  // bytes, and each second group of four keys has its two units exchanged, against bank conflicts.
  alignas(16) std::uint16_t probabilities[2][turn_keys(kCfg)][kCfg.shape.rows];
  FLASHPORT_DEVICE std::uint16_t* probabilities_of(int buffer, int key, int row) {
    return &probabilities[buffer][key][kCfg.shape.rows == 16 ? row ^ key / 4 % 2 * 8 : row];
  }
  float4 row_stats[2][turn_parts(kCfg)][kCfg.shape.rows / 2];  // m and l of two neighbouring rows: m, m, l, l
  [[no_unique_address]] EarlyLengthsOf<kCfg> lengths;
  unsigned arrive_flag;
  bool heads_together;  // as they lie in the rings of all teams
  [[no_unique_address]] std::conditional_t<has_blocks(kCfg.shape), TooMuchOperands, NothingTooMuch> too_much;
  [[no_unique_address]] std::conditional_t<factors_of(kCfg.shape) == Factors::kOfRows, PartUnits<kCfg>, NothingTooMuch>
      units;
  PartialList partials[kCfg.tuning.waves];
};

}  // namespace flashport::FLASHPORT_TARGET::decode
