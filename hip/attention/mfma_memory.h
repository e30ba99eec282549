// LDS of attention on MFMA: two tiles of keys and two of values, which copies fill in turn.
#pragma once

#include "common/device/attention/work.h"
#include "hip/arch/mfma.h"
#include "hip/attention/mfma_layout.h"

namespace flashport::FLASHPORT_TARGET::attention {

inline constexpr int kGroupWaves = 4;  // one a SIMD
inline constexpr int kWaveRows = 32;

constexpr int groups_of(const AttentionConfig& config) { return config.tuning.rows / (kGroupWaves * kWaveRows); }

template <AttentionConfig kCfg>
struct AttentionMemory {
  static constexpr int kKeyBytes = kCfg.tuning.keys * kCfg.shape.head_dim_qk * 2;  // of a tile
  static constexpr int kValueBytes = kCfg.tuning.keys * kCfg.shape.head_dim_v * 2;
  alignas(kLineBytes) unsigned char keys[2 * kKeyBytes];
  alignas(kLineBytes) unsigned char values[2 * kValueBytes];
};

}  // namespace flashport::FLASHPORT_TARGET::attention
