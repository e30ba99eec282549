// LDS of attention: tiles of keys and of values, two of each, which copies fill in turn, or one; and queries that
// registers have no room for.
#pragma once

#include "common/device/attention/work.h"
#include "hip/arch/lane_maps.h"
#include "hip/arch/words.h"
#include "hip/attention/layout.h"
#include FLASHPORT_ATTENTION_TUNING_HEADER

namespace flashport::FLASHPORT_TARGET::attention {

inline constexpr int kWaveRows = kWaveSize / 2;  // queries of a wave
inline constexpr int kGroupThreads = 256;
inline constexpr int kGroupWaves = kGroupThreads / kWaveSize;  // one a SIMD of CDNA, two of RDNA

constexpr int groups_of(const AttentionConfig& config) {
  return config.tuning.rows * config.tuning.slices / (kGroupWaves * kWaveRows);
}

template <int kBytes>
struct SharedBytes {
  alignas(kLineBytes) unsigned char x[kBytes];
};
template <>
struct SharedBytes<0> {};

// Where a head's row of a token lies, of keys or values that are not on pages.
FLASHPORT_DEVICE GlobalBytes first_row(const CacheParams& cache, const WorkTile& work, std::int64_t token, int head) {
  return (GlobalBytes)cache.data + work.seq * cache.page_stride + token * cache.token_stride + head * cache.head_stride;
}

template <AttentionConfig kCfg>
struct AttentionMemory {
  static constexpr AttentionShape kShape = kCfg.shape;
  static constexpr int kStages = kCfg.tuning.stages;
  static constexpr int kKeyBytes = kCfg.tuning.keys * kShape.head_dim_qk * 2;  // of a tile
  static constexpr int kValueBytes = kCfg.tuning.keys * kShape.head_dim_v * 2;
  static constexpr int kQueryBytes = attention_shares_queries(kShape) ? kCfg.tuning.rows * kShape.head_dim_qk * 2 : 0;
  static constexpr int kKeyPlaces = attention_key_places(kShape.head_dim_qk);
  static_assert(kStages <= 2);
  // From the offset of a tile to that of the next.
  static constexpr int kNextKeys = (kStages - 1) * kKeyBytes, kNextValues = (kStages - 1) * kValueBytes;

  alignas(kLineBytes) unsigned char keys[kStages * kKeyBytes];
  alignas(kLineBytes) unsigned char values[kStages * kValueBytes];
  [[no_unique_address]] SharedBytes<kQueryBytes> queries;
};

}  // namespace flashport::FLASHPORT_TARGET::attention
