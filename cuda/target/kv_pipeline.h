// Leaves of K and V on their way through shared memory: a ring of tiles of 64 rows, K, V, K, V, in the order of their
// use. Producer waves (kv_producer.h) do nothing but copy; a full memory system holds up whoever issues copies, and
// would hold up the products. A tile is ready when its mbarrier's phase completes, every producer thread arriving
// behind its copies; it is free again when every compute wave has arrived at the other one.
//
// Rows lie in a tile as stored (also quantised), so that eight rows meet in no bank. Rows outside the sequence and dims
// beyond the stored ones are zero. Copies are cp.async of 16 bytes, or of 8 or 4 where alignment asks for it (q8_0 with
// its block of 34 bytes, odd strides); 2-byte alignment goes through registers.
#pragma once

#include "common/device/announcements.h"
#include "common/device/config.h"
#include "cuda/target/mma.h"
#include "cuda/target/query.h"

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
};

// How a cache's rows lie in tiles of 64 keys: K tiles and V tiles alike take kBytes of the ring.
template <DecodeConfig kCfg>
struct KvTiles {
  using Keys = RowLayout<kCfg.shape.kv, kCfg.shape.head_dim_qk>;
  using Values = RowLayout<kCfg.shape.kv, kCfg.shape.head_dim_v>;
  static constexpr int kBytes =
      (kLeafKeys * (Keys::kPitch > Values::kPitch ? Keys::kPitch : Values::kPitch) + 127) / 128 * 128;
};

// Where a wave stands in the ring.
template <int kTiles>
struct RingPlace {
  int tile = 0;
  unsigned phase = 0;
  FLASHPORT_DEVICE void next() {
    if (++tile == kTiles) {
      tile = 0;
      phase ^= 1;
    }
  }
};

template <DecodeConfig kCfg>
struct KvRing {
  static constexpr int kTiles = kCfg.tuning.stages;
  static constexpr int kQueries = sizeof(QueryTile<kCfg>) > 8 * 1024 ? 1 : 2;  // the next one early, if it is small
  // Page numbers are brought so many leaves early. Those of a leaf have landed when its keys' place is free: the tile
  // that was there before it was asked for behind them.
  static constexpr int kLookAhead = (kTiles + 1) / 2 + 2;
  alignas(128) char tiles[kTiles][KvTiles<kCfg>::kBytes];
  QueryTile<kCfg> queries[kQueries];
  alignas(8) std::uint64_t ready[kTiles];  // of a tile, and of the query tile that was asked for before it
  std::uint64_t free[kTiles];
  std::uint64_t query_free[kQueries];
  int pages[kLookAhead][kLeafKeys];
  // Where the rows of the leaf that is being copied lie.
  const char* key_rows[kLeafKeys];
  const char* value_rows[kLeafKeys];

  // `thread`: of the team.
  FLASHPORT_DEVICE void init(unsigned thread) {
    const unsigned i = thread;
    if (i < kTiles) mbarrier_init(&ready[i], kCfg.tuning.teams * kCfg.tuning.producer_waves * kWaveSize);
    if (i < kTiles) mbarrier_init(&free[i], kCfg.tuning.waves * kWaveSize);
    if (i < kQueries) mbarrier_init(&query_free[i], kCfg.tuning.waves * kWaveSize);
  }
};

// Barriers of a team: of its compute waves, of its producers, and where the compute waves wait for the announcements of
// the last tile, which the first producer wave plans.
enum TeamBarrier { kComputeBarrier = 1, kProducerBarrier, kEndsBarrier, kTeamBarriers = kEndsBarrier };
constexpr int ends_threads(const DecodeConfig& cfg) { return (cfg.tuning.waves + 1) * kWaveSize; }

// What a compute wave sees of the ring.
template <DecodeConfig kCfg>
class KvPipeline {
 public:
  template <class Shared>
  FLASHPORT_DEVICE KvPipeline(const DecodeParams&, const Block& block, Shared& shared, LeafCursor&)
      : block_(block), ring_(shared.ring) {}

  // Waits for the oldest leaf's keys.
  FLASHPORT_DEVICE const char* keys() const {
    mbarrier_wait(&ring_.ready[place_.tile], place_.phase);
    return ring_.tiles[place_.tile];
  }
  FLASHPORT_DEVICE void refill_behind_keys(const DecodeParams&, LeafCursor&) const {}
  FLASHPORT_DEVICE void refill_behind_scores(const DecodeParams&, LeafCursor&) { release(); }
  FLASHPORT_DEVICE void await_values() const { mbarrier_wait(&ring_.ready[place_.tile], place_.phase); }
  FLASHPORT_DEVICE const char* values() const { return ring_.tiles[place_.tile]; }
  FLASHPORT_DEVICE void refill_behind_values(const DecodeParams&, LeafCursor&) { release(); }
  FLASHPORT_DEVICE void await_ends() const {
    barrier_await(block_.team() * kTeamBarriers + kEndsBarrier, ends_threads(kCfg));
  }

 private:
  FLASHPORT_DEVICE void release() {
    mbarrier_arrive(&ring_.free[place_.tile]);
    place_.next();
  }

  const Block& block_;
  KvRing<kCfg>& ring_;
  RingPlace<KvRing<kCfg>::kTiles> place_;
};

}  // namespace flashport::FLASHPORT_TARGET
