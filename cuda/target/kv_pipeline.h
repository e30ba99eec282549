// Leaves of K and V on their way through shared memory. A leaf slot holds the rows of K, then the rows of V, as stored
// (also quantised), laid out so that eight rows meet in no bank. A wave copies the rows that its lanes have looked up.
// Rows outside the sequence and dims beyond the stored ones are zero.
//
// Copies are cp.async of 16 bytes, or of 8 or 4 where alignment asks for it (q8_0 with its block of 34 bytes, odd
// strides); 2-byte alignment goes through registers. A tile is ready when its mbarrier's phase completes: every thread
// arrives behind its copies.
#pragma once

#include "common/device/config.h"
#include "common/device/schedule.h"
#include "cuda/target/mma.h"

namespace flashport::FLASHPORT_TARGET {

// Rows of one tile in shared memory. Rows of whole 64-byte units lie as in device memory, 16-byte units exchanged by
// the row's number (a shift of a row by padding would tear the copies' 128-byte requests apart); q8_0 rows are padded.
template <KvFormat kFormat, int kDim>
struct RowLayout {
  static constexpr int kBytes = kv_row_bytes(kFormat, kDim);
  static constexpr bool kSwizzled = kBytes % 64 == 0;
  static constexpr int kPitch = kSwizzled ? kBytes : ((kBytes + 15) / 16 | 1) * 16;

  // What the place of a byte is xored with in row `row`.
  FLASHPORT_DEVICE static constexpr int swizzle(int row) {
    if constexpr (!kSwizzled) return 0;
    return kPitch % 128 == 0 ? (row & 7) << 4 : (row >> 1 & 3) << 4;
  }
  FLASHPORT_DEVICE static constexpr int offset(int row, int byte) { return row * kPitch + (byte ^ swizzle(row)); }
  // The same for a lane's 16-byte unit plus `column` bytes, a multiple of 32: only its place inside 128 bytes is
  // exchanged, so that four addresses serve all columns.
  FLASHPORT_DEVICE static constexpr int at(int row, int unit, int column) {
    return row * kPitch + column / 128 * 128 + ((unit ^ swizzle(row)) ^ column % 128);
  }
};

template <DecodeConfig kCfg>
struct LeafSlot {
  using Keys = RowLayout<kCfg.shape.kv, kCfg.shape.head_dim_qk>;
  using Values = RowLayout<kCfg.shape.kv, kCfg.shape.head_dim_v>;
  alignas(128) char keys[kLeafKeys * Keys::kPitch];
  alignas(128) char values[kLeafKeys * Values::kPitch];
};

struct LeafBarriers {
  std::uint64_t keys, values;
};

template <DecodeConfig kCfg, class Shared>
class KvPipelineOf {
  static constexpr int kStages = kCfg.tuning.stages;
  static constexpr int kThreads = kCfg.tuning.waves * kWaveSize;
  static constexpr int kRowsPerWave = kLeafKeys / kCfg.tuning.waves;
  using Slot = LeafSlot<kCfg>;
  static_assert(kRowsPerWave <= kWaveSize);

 public:
  FLASHPORT_DEVICE KvPipelineOf(const DecodeParams& p, const Block& block, Shared& shared, LeafCursor& ahead)
      : block_(block), slots_(shared.leaves), ready_(shared.ready) {
    if (block.thread() == 0) {
      for (int i = 0; i < kStages; ++i) {
        mbarrier_init(&ready_[i].keys, kThreads);
        mbarrier_init(&ready_[i].values, kThreads);
      }
    }
    block.sync();
    look_up(p, ahead);
    for (int i = 0; i < kStages; ++i) {
      const Due keys = take_next(p, ahead);
      copy_values(p);
      copy_keys(p, keys);
    }
  }

  // Waits for the oldest leaf's keys.
  FLASHPORT_DEVICE const char* keys() const {
    if constexpr (kStages == 1) block_.sync();  // every wave is done with the values before
    mbarrier_wait(&ready_[oldest_].keys, phase_);
    return slots_[oldest_].keys;
  }

  // Behind the scores of a leaf its keys' slot is free, and the values' slot of the leaf before. A single slot of
  // values is free behind keys() only.
  FLASHPORT_DEVICE void refill_behind_keys(const DecodeParams& p, LeafCursor&) {
    if constexpr (kStages == 1) copy_values(p);
  }
  FLASHPORT_DEVICE void refill_behind_scores(const DecodeParams& p, LeafCursor& ahead) {
    const Due keys = take_next(p, ahead);
    if constexpr (kStages > 1) copy_values(p);
    copy_keys(p, keys);
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
  // A tile that is to be copied: this lane's row of it, and the kv head; -1: none.
  struct Due {
    TokenPlace place;
    int head;
  };

  // The leaf that `ahead` stands at; moves it on and looks the next one up, before the copies, which would hold the
  // page numbers back.
  FLASHPORT_DEVICE Due take_next(const DecodeParams& p, LeafCursor& ahead) {
    if (ahead.done()) return {place_, -1};
    const Segment& s = ahead.segment;
    const Due due{{s.pages == nullptr ? s.seq : place_.page, place_.offset}, s.kv_head};
    ahead.next(p);
    look_up(p, ahead);
    return due;
  }
  FLASHPORT_DEVICE void copy_keys(const DecodeParams& p, const Due& keys) {
    values_ = keys;
    if (keys.head < 0) return;
    copy<typename Slot::Keys>(p.k, keys.place, keys.head, slots_[newest_keys_].keys, &ready_[newest_keys_].keys);
    newest_keys_ = newest_keys_ + 1 == kStages ? 0 : newest_keys_ + 1;
  }
  // The values whose keys were the last to be copied.
  FLASHPORT_DEVICE void copy_values(const DecodeParams& p) {
    if (values_.head < 0) return;
    copy<typename Slot::Values>(p.v, values_.place, values_.head, slots_[newest_values_].values,
                                &ready_[newest_values_].values);
    newest_values_ = newest_values_ + 1 == kStages ? 0 : newest_values_ + 1;
    values_.head = -1;
  }

  // Lane i looks up row i of the wave's rows, one leaf before the address is needed. The load is never branched around:
  // behind a branch the compiler would wait for it at once. Where there is nothing to look up it reads the query.
  FLASHPORT_DEVICE void look_up(const DecodeParams& p, const LeafCursor& ahead) {
    const Segment& s = ahead.segment;
    const int token = ahead.key() + block_.wave() * kRowsPerWave + block_.lane() % kRowsPerWave;
    const bool valid = !ahead.done() && token >= s.key_low && token < s.key_high;
    const PageOf at = page_of(p, s.pages, token);
    place_.offset = valid ? at.offset : -1;
    place_.page = load_global(valid && s.pages != nullptr ? s.pages + at.page : static_cast<const std::int32_t*>(p.q));
  }

  template <class Layout>
  FLASHPORT_DEVICE void copy(const CacheParams& cache, TokenPlace place, int head, char* tile,
                             std::uint64_t* ready) const {
    constexpr int kWide = Layout::kBytes % 16 == 0 ? 16 : (Layout::kBytes % 8 == 0 ? 8 : 4);
    const std::int64_t offset = row_offset(cache, place, head);
    if (cache.copy_unit >= kWide && cache.row_bytes == Layout::kBytes && __all_sync(~0u, offset >= 0)) {
      copy_whole_rows<Layout, kWide>(tile, static_cast<const char*>(cache.data) + offset);
    } else if (cache.copy_unit >= kWide) {
      copy_rows<Layout, kWide>(tile, cache, offset);
    } else if (cache.copy_unit >= 4) {
      copy_rows<Layout, 4>(tile, cache, offset);
    } else {
      copy_rows<Layout, 2>(tile, cache, offset);
      __threadfence_block();
    }
    mbarrier_arrive_behind_copies(ready);
  }

  // Every row is there: lanes take units of a row side by side, and get the row's address from the lane that has it.
  template <class Layout, int kUnit>
  FLASHPORT_DEVICE void copy_whole_rows(char* tile, const char* my_row) const {
    constexpr int kUnits = Layout::kBytes / kUnit;
    const int wave_row = block_.wave() * kRowsPerWave;
    if constexpr (kUnits % kWaveSize == 0 || kWaveSize % kUnits == 0) {
      // A lane keeps its column of the tile; rows are a power of two at once, so a row's swizzle is xored in.
      constexpr int kAtOnce = kUnits >= kWaveSize ? 1 : kWaveSize / kUnits;
      constexpr int kPerRow = kUnits >= kWaveSize ? kUnits / kWaveSize : 1;
      const int byte = block_.lane() % kUnits * kUnit;
      const int first = block_.lane() / kUnits;
      char* to = tile + (wave_row + first) * Layout::kPitch;
      const int column = byte ^ Layout::swizzle(wave_row + first);
#pragma unroll 4
      for (int row = 0; row < kRowsPerWave; row += kAtOnce) {
        const char* from = shuffle(my_row, row + first) + byte;
#pragma unroll
        for (int part = 0; part < kPerRow; ++part) {
          copy_async<kUnit>(to + row * Layout::kPitch + ((column ^ Layout::swizzle(row)) + part * kWaveSize * kUnit),
                            from + part * kWaveSize * kUnit, true);
        }
      }
    } else {
      constexpr int kCopies = kRowsPerWave * kUnits;
#pragma unroll
      for (int step = 0; step < (kCopies + kWaveSize - 1) / kWaveSize; ++step) {
        const int copy = step * kWaveSize + block_.lane();
        const int row = copy / kUnits;
        const int byte = (copy - row * kUnits) * kUnit;
        const char* from = shuffle(my_row, row % kRowsPerWave) + byte;
        if (kCopies % kWaveSize == 0 || copy < kCopies) {
          copy_async<kUnit>(tile + Layout::offset(wave_row + row, byte), from, true);
        }
      }
    }
  }

  FLASHPORT_DEVICE static const char* shuffle(const char* pointer, int lane) {
    return reinterpret_cast<const char*>(__shfl_sync(~0u, reinterpret_cast<unsigned long long>(pointer), lane));
  }

  // The same unit by unit, with zeros for rows and dims that are not there.
  template <class Layout, int kUnit>
  FLASHPORT_DEVICE void copy_rows(char* tile, const CacheParams& cache, std::int64_t offset) const {
    constexpr int kUnits = Layout::kBytes / kUnit;
    constexpr int kCopies = kRowsPerWave * kUnits;
    const char* base = static_cast<const char*>(cache.data);
#pragma unroll 1
    for (int step = 0; step < (kCopies + kWaveSize - 1) / kWaveSize; ++step) {
      const int copy = step * kWaveSize + block_.lane();
      const int row = copy / kUnits;
      const int byte = (copy - row * kUnits) * kUnit;
      const std::int64_t from = __shfl_sync(~0u, offset, row % kRowsPerWave);
      if (copy >= kCopies) break;
      const bool valid = from >= 0 && byte < cache.row_bytes;
      char* to = tile + Layout::offset(block_.wave() * kRowsPerWave + row, byte);
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
  TokenPlace place_;  // of the next keys
  Due values_{{0, -1}, -1};
  int oldest_ = 0, newest_keys_ = 0, newest_values_ = 0;
  unsigned phase_ = 0;
};

}  // namespace flashport::FLASHPORT_TARGET
