// Leaves of K and V on their way through shared memory. A leaf slot holds 64 rows of K, then 64 rows of V, as stored
// (also quantised), each row on a pitch of an odd number of 16-byte units so that eight rows meet in no bank. Copies are
// committed in the order K0 V0 K1 V1 ...; a wave copies the rows it looked up. Rows outside the sequence are zero.
#pragma once

#include "common/device/config.h"
#include "common/device/schedule.h"
#include "cuda/target/mma.h"

namespace flashport::FLASHPORT_TARGET {

constexpr int row_pitch(int row_bytes) { return ((row_bytes + 15) / 16 | 1) * 16; }

template <DecodeConfig kCfg>
struct LeafSlot {
  static constexpr int kKeyPitch = row_pitch(kv_row_bytes(kCfg.shape.kv, kCfg.shape.head_dim_qk));
  static constexpr int kValuePitch = row_pitch(kv_row_bytes(kCfg.shape.kv, kCfg.shape.head_dim_v));
  alignas(16) char keys[kLeafKeys * kKeyPitch];
  alignas(16) char values[kLeafKeys * kValuePitch];
};

template <DecodeConfig kCfg, class Shared>
class KvPipelineOf {
  static constexpr int kStages = kCfg.tuning.stages;
  static constexpr int kRowsPerWave = kLeafKeys / kCfg.tuning.waves;
  using Slot = LeafSlot<kCfg>;

 public:
  FLASHPORT_DEVICE KvPipelineOf(const DecodeParams& p, const Block& block, Shared& shared, LeafCursor& ahead)
      : block_(block), slots_(shared.leaves) {
    look_up(p, ahead);
    if constexpr (kStages == 1) {
      copy_keys(p, ahead);
    } else {
      for (int i = 0; i < kStages - 1; ++i) refill_behind_keys(p, ahead);
    }
  }

  // Waits for the oldest leaf's keys. Behind its barrier every wave is done with the leaf before.
  FLASHPORT_DEVICE const char* keys() const {
    copy_wait<(kStages == 1 ? 0 : 2 * kStages - 3)>();
    block_.sync();
    return slots_[oldest_].keys;
  }

  // Behind keys(): copies the next leaf into the slot that the leaf before has left. A single slot has its place for
  // values free only here, and for keys only behind the scores.
  FLASHPORT_DEVICE void refill_behind_keys(const DecodeParams& p, LeafCursor& ahead) {
    if (!ahead.done()) {
      if constexpr (kStages > 1) copy_keys(p, ahead);
      copy_values(p, ahead);
      newest_ = newest_ + 1 == kStages ? 0 : newest_ + 1;
      ahead.next(p);
      if (!ahead.done()) look_up(p, ahead);
    } else if constexpr (kStages > 1) {
      copy_commit();
      copy_commit();
    }
  }
  FLASHPORT_DEVICE void refill_behind_scores(const DecodeParams& p, const LeafCursor& ahead) {
    if constexpr (kStages == 1) {
      if (!ahead.done()) copy_keys(p, ahead);
    }
  }

  // The oldest leaf's values have landed for this thread's copies; readable by all behind the next barrier.
  FLASHPORT_DEVICE void await_values() const { copy_wait<(kStages == 1 ? 0 : 2 * kStages - 2)>(); }

  // The oldest leaf's values; the leaf is given up with them.
  FLASHPORT_DEVICE const char* values() {
    const char* tile = slots_[oldest_].values;
    oldest_ = oldest_ + 1 == kStages ? 0 : oldest_ + 1;
    return tile;
  }

 private:
  // Lane i of a wave looks up row i of the wave's rows, one leaf before its address is needed.
  FLASHPORT_DEVICE void look_up(const DecodeParams& p, const LeafCursor& ahead) {
    const Segment& s = ahead.segment;
    const int token = ahead.key() + block_.wave() * kRowsPerWave + block_.lane() % kRowsPerWave;
    place_ = place_of(p, s.pages, s.seq, token, token >= s.key_low && token < s.key_high);
  }

  FLASHPORT_DEVICE void copy_keys(const DecodeParams& p, const LeafCursor& ahead) const {
    const int head = ahead.segment.tile / p.row_tiles;
    copy<Slot::kKeyPitch, kCfg.shape.head_dim_qk>(slots_[newest_].keys, p.k, row_offset(p.k, place_, head));
    copy_commit();
  }
  FLASHPORT_DEVICE void copy_values(const DecodeParams& p, const LeafCursor& ahead) const {
    const int head = ahead.segment.tile / p.row_tiles;
    copy<Slot::kValuePitch, kCfg.shape.head_dim_v>(slots_[newest_].values, p.v, row_offset(p.v, place_, head));
    copy_commit();
  }

  template <int kPitch, int kDim>
  FLASHPORT_DEVICE void copy(char* tile, const CacheParams& cache, std::int64_t offset) const {
    constexpr int kTileBytes = kv_row_bytes(kCfg.shape.kv, kDim);
    constexpr int kWide = kTileBytes % 16 == 0 ? 16 : (kTileBytes % 8 == 0 ? 8 : 4);
    if (cache.copy_unit >= kWide) {
      copy_rows<kPitch, kTileBytes, kWide>(tile, cache, offset);
    } else if (cache.copy_unit >= 4) {
      copy_rows<kPitch, kTileBytes, 4>(tile, cache, offset);
    } else {
      copy_rows<kPitch, kTileBytes, 2>(tile, cache, offset);
    }
  }

  template <int kPitch, int kTileBytes, int kUnit>
  FLASHPORT_DEVICE void copy_rows(char* tile, const CacheParams& cache, std::int64_t offset) const {
    constexpr int kUnits = kTileBytes / kUnit;
    constexpr int kCopies = kRowsPerWave * kUnits;
    constexpr int kSteps = (kCopies + kWaveSize - 1) / kWaveSize;
    char* rows = tile + block_.wave() * kRowsPerWave * kPitch;
    const char* base = static_cast<const char*>(cache.data);
#pragma unroll(kUnit >= 8 ? 4 : 1)
    for (int step = 0; step < kSteps; ++step) {
      const int copy = step * kWaveSize + block_.lane();
      const int row = copy / kUnits;
      const int byte = (copy - row * kUnits) * kUnit;
      const std::int64_t from = __shfl_sync(~0u, offset, row % kRowsPerWave);
      if (kCopies % kWaveSize != 0 && row >= kRowsPerWave) break;
      const bool valid = from >= 0 && byte < cache.row_bytes;
      char* to = rows + row * kPitch + byte;
      const char* source = valid ? base + from + byte : base;
      if constexpr (kUnit >= 4) {
        copy_async<kUnit>(to, source, valid);
      } else {
        *reinterpret_cast<std::uint16_t*>(to) = valid ? __ldg(reinterpret_cast<const std::uint16_t*>(source)) : 0;
      }
    }
  }

  const Block& block_;
  Slot* slots_;
  TokenPlace place_;
  int oldest_ = 0, newest_ = 0;
};

}  // namespace flashport::FLASHPORT_TARGET
