// LDS of attention: tiles of keys and of values, two of each, which copies fill in turn, or one, or one place that keys
// and values have in turn; and queries that registers have no room for.
#pragma once

#include <bit>

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

// Whether one group of waves copies keys and the other values, of tiles with too few keys for each to copy half of
// both.
constexpr bool groups_copy_apart(const AttentionConfig& config) {
  return groups_of(config) == 2 && config.tuning.keys == 32;
}
// The groups that share the copies of a tile.
constexpr int copying_groups(const AttentionConfig& config) {
  return groups_copy_apart(config) ? 1 : groups_of(config);
}
// The number of a wave's group among those.
template <AttentionConfig kCfg>
FLASHPORT_DEVICE int copying_group(const Block& block) {
  return copying_groups(kCfg) == 1 ? 0 : block.wave() / kGroupWaves;
}
template <AttentionConfig kCfg>
FLASHPORT_DEVICE bool copies_keys(const Block& block) {
  return !groups_copy_apart(kCfg) || block.wave() < kGroupWaves;
}
template <AttentionConfig kCfg>
FLASHPORT_DEVICE bool copies_values(const Block& block) {
  return !groups_copy_apart(kCfg) || block.wave() >= kGroupWaves;
}

template <int kBytes>
struct SharedBytes {
  alignas(kLineBytes) unsigned char x[kBytes];
};
template <>
struct SharedBytes<0> {};

template <int kKeyBytes, int kValueBytes, bool kInTurn>
struct KvTiles {
  alignas(kLineBytes) unsigned char keys[kKeyBytes];
  alignas(kLineBytes) unsigned char values[kValueBytes];
};
template <int kKeyBytes, int kValueBytes>
struct KvTiles<kKeyBytes, kValueBytes, true> {
  union {
    alignas(kLineBytes) unsigned char keys[kKeyBytes];
    alignas(kLineBytes) unsigned char values[kValueBytes];
  };
};

// Where a head's row of a token lies, of keys or values that are not on pages.
FLASHPORT_DEVICE GlobalBytes first_row(const CacheParams& cache, const WorkTile& work, std::int64_t token, int head) {
  return (GlobalBytes)cache.data + work.seq * cache.page_stride + token * cache.token_stride + head * cache.head_stride;
}

template <AttentionConfig kCfg>
struct AttentionSizes {
  static constexpr AttentionShape kShape = kCfg.shape;
  static constexpr int kStages = kCfg.tuning.stages;
  static constexpr int kKeyBytes = kCfg.tuning.keys * kShape.head_dim_qk * 2;  // of a tile
  static constexpr int kValueBytes = kCfg.tuning.keys * kShape.head_dim_v * 2;
  static constexpr int kQueryBytes = attention_shares_queries(kShape) ? kCfg.tuning.rows * kShape.head_dim_qk * 2 : 0;
  static constexpr int kKeyPlaces = attention_key_places(kShape.head_dim_qk);
  static constexpr bool kInTurn = attention_tiles_take_turns(kShape);
  static_assert(kStages <= (kInTurn ? 1 : 2));
  // From the offset of a tile to that of the next, by an exclusive or.
  static constexpr int kNextKeys = (kStages - 1) * static_cast<int>(std::bit_ceil(unsigned{kKeyBytes}));
  static constexpr int kNextValues = (kStages - 1) * static_cast<int>(std::bit_ceil(unsigned{kValueBytes}));
};

template <AttentionConfig kCfg, class Sizes = AttentionSizes<kCfg>>
struct AttentionMemory
    : Sizes,
      KvTiles<Sizes::kNextKeys + Sizes::kKeyBytes, Sizes::kNextValues + Sizes::kValueBytes, Sizes::kInTurn> {
  [[no_unique_address]] SharedBytes<Sizes::kQueryBytes> queries;
};

}  // namespace flashport::FLASHPORT_TARGET::attention
