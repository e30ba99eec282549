// LDS of attention: two tiles of keys and two of values, which copies fill in turn.
#pragma once

#include "common/device/attention/work.h"
#include "hip/arch/words.h"
#include "hip/attention/layout.h"

namespace flashport::FLASHPORT_TARGET::attention {

inline constexpr int kWaveRows = kWaveSize / 2;  // queries of a wave
inline constexpr int kGroupThreads = 256;
inline constexpr int kGroupWaves = kGroupThreads / kWaveSize;  // one a SIMD of CDNA, two of RDNA

constexpr int groups_of(const AttentionConfig& config) { return config.tuning.rows / (kGroupWaves * kWaveRows); }

template <AttentionConfig kCfg>
struct AttentionMemory {
  static constexpr int kKeyBytes = kCfg.tuning.keys * kCfg.shape.head_dim_qk * 2;  // of a tile
  static constexpr int kValueBytes = kCfg.tuning.keys * kCfg.shape.head_dim_v * 2;
  alignas(kLineBytes) unsigned char keys[2 * kKeyBytes];
  alignas(kLineBytes) unsigned char values[2 * kValueBytes];
};

}  // namespace flashport::FLASHPORT_TARGET::attention
