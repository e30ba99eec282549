// Leaves of K and V on their way through shared memory. A leaf slot holds 64 rows of K, then 64 rows of V, as stored
// (also quantised), each row on a pitch of an odd number of 16-byte units so that eight rows meet in no bank. A wave
// brings its share of the rows, lanes 0 to 15 looking up and copying K, lanes 16 to 31 V. Rows outside the sequence are
// zero.
//
// Rows of whole 16-byte units travel as one bulk copy each; others (q8_0 by its block of 34 bytes, odd strides) through
// cp.async of 8 or 4 bytes, or through registers. A tile is ready when its mbarrier's phase completes: every wave (every
// thread off the bulk path) arrives once, and all announced bytes have landed.
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

struct LeafBarriers {
  std::uint64_t keys, values;
};

template <DecodeConfig kCfg, class Shared>
class KvPipelineOf {
  static constexpr int kStages = kCfg.tuning.stages;
  static constexpr int kThreads = kCfg.tuning.waves * kWaveSize;
  static constexpr int kRowsPerWave = kLeafKeys / kCfg.tuning.waves;
  static constexpr int kKeyBytes = kv_row_bytes(kCfg.shape.kv, kCfg.shape.head_dim_qk);
  static constexpr int kValueBytes = kv_row_bytes(kCfg.shape.kv, kCfg.shape.head_dim_v);
  using Slot = LeafSlot<kCfg>;
  static_assert(kRowsPerWave <= 16);

 public:
  FLASHPORT_DEVICE KvPipelineOf(const DecodeParams& p, const Block& block, Shared& shared, LeafCursor& ahead)
      : block_(block), slots_(shared.leaves), ready_(shared.ready), bulk_(p.k.copy_unit >= 16 && p.v.copy_unit >= 16) {
    if (block.thread() == 0) {
      for (int i = 0; i < kStages; ++i) {
        mbarrier_init(&ready_[i].keys, bulk_ ? kCfg.tuning.waves : kThreads);
        mbarrier_init(&ready_[i].values, bulk_ ? kCfg.tuning.waves : kThreads);
      }
    }
    // Bulk copies bring the bytes there are; the dims that the tile has beyond them stay zero from here on.
    if (p.k.row_bytes < kKeyBytes || p.v.row_bytes < kValueBytes) {
      auto* units = reinterpret_cast<uint4*>(slots_);
      for (int i = block.thread(); i < static_cast<int>(kStages * sizeof(Slot) / 16); i += kThreads) {
        units[i] = make_uint4(0, 0, 0, 0);
      }
    }
    fence_async_proxy();
    block.sync();
    look_up(p, ahead);
    if constexpr (kStages == 1) {
      copy_keys(p, ahead);
    } else {
      for (int i = 0; i < kStages - 1; ++i) refill(p, ahead);
    }
  }

  // Waits for the oldest leaf's keys.
  FLASHPORT_DEVICE const char* keys() const {
    if constexpr (kStages == 1) block_.sync();  // every wave is done with the values before
    mbarrier_wait(&ready_[oldest_].keys, phase_);
    return slots_[oldest_].keys;
  }

  // A single slot has its place for values free behind keys(), and for keys behind the scores. Of several slots the one
  // that the leaf before has left is free behind the scores.
  FLASHPORT_DEVICE void refill_behind_keys(const DecodeParams& p, LeafCursor& ahead) {
    if constexpr (kStages == 1) {
      copy_values(p, ahead);
      ahead.next(p);
      if (!ahead.done()) look_up(p, ahead);
    }
  }
  FLASHPORT_DEVICE void refill_behind_scores(const DecodeParams& p, LeafCursor& ahead) {
    if constexpr (kStages == 1) {
      if (!ahead.done()) copy_keys(p, ahead);
    } else {
      refill(p, ahead);
    }
  }

  FLASHPORT_DEVICE void await_values() const { mbarrier_wait(&ready_[oldest_].values, phase_); }

  // The oldest leaf's values; the leaf is given up with them.
  FLASHPORT_DEVICE const char* values() {
    const char* tile = slots_[oldest_].values;
    if (++oldest_ == kStages) {
      oldest_ = 0;
      phase_ ^= 1;
    }
    return tile;
  }

 private:
  FLASHPORT_DEVICE void refill(const DecodeParams& p, LeafCursor& ahead) {
    if (ahead.done()) return;
    if (bulk_) {
      const bool values = block_.lane() >= 16;
      const CacheParams& cache = values ? p.v : p.k;
      Slot& slot = slots_[newest_];
      copy_bulk(values ? slot.values : slot.keys, values ? Slot::kValuePitch : Slot::kKeyPitch,
                values ? kValueBytes : kKeyBytes, cache, row_offset(cache, place_, ahead.segment.kv_head),
                values ? &ready_[newest_].values : &ready_[newest_].keys, true);
    } else {
      copy_units<Slot::kKeyPitch, kKeyBytes>(slots_[newest_].keys, p.k, ahead.segment.kv_head, &ready_[newest_].keys);
      copy_units<Slot::kValuePitch, kValueBytes>(slots_[newest_].values, p.v, ahead.segment.kv_head,
                                                 &ready_[newest_].values);
    }
    newest_ = newest_ + 1 == kStages ? 0 : newest_ + 1;
    ahead.next(p);
    if (!ahead.done()) look_up(p, ahead);
  }

  // The halves of a refill, for a single slot.
  FLASHPORT_DEVICE void copy_keys(const DecodeParams& p, const LeafCursor& ahead) const {
    const int head = ahead.segment.kv_head;
    if (bulk_) {
      copy_bulk(slots_[0].keys, Slot::kKeyPitch, kKeyBytes, p.k, row_offset(p.k, place_, head), &ready_[0].keys,
                block_.lane() < 16);
    } else {
      copy_units<Slot::kKeyPitch, kKeyBytes>(slots_[0].keys, p.k, head, &ready_[0].keys);
    }
  }
  FLASHPORT_DEVICE void copy_values(const DecodeParams& p, const LeafCursor& ahead) const {
    const int head = ahead.segment.kv_head;
    if (bulk_) {
      copy_bulk(slots_[0].values, Slot::kValuePitch, kValueBytes, p.v, row_offset(p.v, place_, head),
                &ready_[0].values, block_.lane() < 16);
    } else {
      copy_units<Slot::kValuePitch, kValueBytes>(slots_[0].values, p.v, head, &ready_[0].values);
    }
  }

  // Lanes i and i + 16 look up row i of the wave's rows, one leaf before the address is needed.
  FLASHPORT_DEVICE void look_up(const DecodeParams& p, const LeafCursor& ahead) {
    const Segment& s = ahead.segment;
    const int row = block_.lane() % 16;
    const int token = ahead.key() + block_.wave() * kRowsPerWave + row;
    place_ = place_of(p, s.pages, s.seq, token, row < kRowsPerWave && token >= s.key_low && token < s.key_high);
  }

  // One bulk copy a lane; the first lane of each half announces the half's bytes. Called by the whole wave; `mine` lanes
  // take part.
  FLASHPORT_DEVICE void copy_bulk(char* tile, int pitch, int tile_bytes, const CacheParams& cache,
                                  std::int64_t offset, std::uint64_t* ready, bool mine) const {
    const int row = block_.lane() % 16;
    char* to = tile + (block_.wave() * kRowsPerWave + row) * pitch;
    const unsigned all = __ballot_sync(~0u, offset >= 0);
    const unsigned half = block_.lane() < 16 ? all & 0xffffu : all >> 16;
    if (mine && offset < 0 && row < kRowsPerWave) {
      for (int byte = 0; byte < tile_bytes; byte += 16) *reinterpret_cast<uint4*>(to + byte) = make_uint4(0, 0, 0, 0);
      fence_async_proxy();
    }
    __syncwarp();
    if (!mine) return;
    if (row == 0) mbarrier_arrive_expect(ready, __popc(half) * cache.row_bytes);
    if (offset >= 0) copy_bulk_async(to, static_cast<const char*>(cache.data) + offset, cache.row_bytes, ready);
  }

  template <int kPitch, int kTileBytes>
  FLASHPORT_DEVICE void copy_units(char* tile, const CacheParams& cache, int head, std::uint64_t* ready) const {
    const std::int64_t offset = row_offset(cache, place_, head);
    if (kTileBytes % 8 == 0 && cache.copy_unit >= 8) {
      copy_rows<kPitch, kTileBytes, 8>(tile, cache, offset);
    } else if (cache.copy_unit >= 4) {
      copy_rows<kPitch, kTileBytes, 4>(tile, cache, offset);
    } else {
      copy_rows<kPitch, kTileBytes, 2>(tile, cache, offset);
    }
    mbarrier_arrive_behind_copies(ready);
  }

  template <int kPitch, int kTileBytes, int kUnit>
  FLASHPORT_DEVICE void copy_rows(char* tile, const CacheParams& cache, std::int64_t offset) const {
    constexpr int kUnits = kTileBytes / kUnit;
    constexpr int kCopies = kRowsPerWave * kUnits;
    constexpr int kSteps = (kCopies + kWaveSize - 1) / kWaveSize;
    char* rows = tile + block_.wave() * kRowsPerWave * kPitch;
    const char* base = static_cast<const char*>(cache.data);
#pragma unroll(kUnit == 8 ? 4 : 1)
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
  LeafBarriers* ready_;
  TokenPlace place_;
  bool bulk_;
  int oldest_ = 0, newest_ = 0;
  unsigned phase_ = 0;
};

}  // namespace flashport::FLASHPORT_TARGET
