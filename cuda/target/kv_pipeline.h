// Leaves of K and V on their way through shared memory: a ring of tiles of 64 rows, K, V, K, V, in the order of their
// use. Producer waves do nothing but copy; a full memory system holds up whoever issues copies, and would hold up the
// products. A tile is ready when its mbarrier's phase completes, every producer thread arriving behind its copies; it
// is free again when every compute wave has arrived at the other one.
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

  FLASHPORT_DEVICE void init() {
    const unsigned i = threadIdx.x;
    if (i < kTiles) mbarrier_init(&ready[i], kCfg.tuning.producer_waves * kWaveSize);
    if (i < kTiles) mbarrier_init(&free[i], kCfg.tuning.waves * kWaveSize);
    if (i < kQueries) mbarrier_init(&query_free[i], kCfg.tuning.waves * kWaveSize);
  }
};

// Where the compute waves wait for the announcements of the last tile, which the first producer wave plans.
inline constexpr int kEndsBarrier = 3;
constexpr int ends_threads(const DecodeConfig& cfg) { return (cfg.tuning.waves + 1) * kWaveSize; }

// What a compute wave sees of the ring.
template <DecodeConfig kCfg>
class KvPipeline {
 public:
  template <class Shared>
  FLASHPORT_DEVICE KvPipeline(const DecodeParams&, const Block&, Shared& shared, LeafCursor&) : ring_(shared.ring) {}

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
  FLASHPORT_DEVICE void await_ends() const { barrier_await(kEndsBarrier, ends_threads(kCfg)); }

 private:
  FLASHPORT_DEVICE void release() {
    mbarrier_arrive(&ring_.free[place_.tile]);
    place_.next();
  }

  KvRing<kCfg>& ring_;
  RingPlace<KvRing<kCfg>::kTiles> place_;
};

// The producer waves' share of decode(): the same leaves in the same order. `block` has these waves alone.
template <DecodeConfig kCfg>
class KvProducer {
  static constexpr int kRowsPerWave = kLeafKeys / kCfg.tuning.producer_waves;
  static constexpr int kRowsAtOnce = kRowsPerWave < kWaveSize ? kRowsPerWave : kWaveSize;
  static constexpr int kRowsPerLane = kRowsPerWave / kRowsAtOnce;
  static constexpr int kLookAhead = KvRing<kCfg>::kLookAhead;
  using Tiles = KvTiles<kCfg>;

 public:
  FLASHPORT_DEVICE KvProducer(const DecodeParams& p, const Block& block, KvRing<kCfg>& ring)
      : block_(block),
        ring_(ring),
        as_stored_(is_as_stored<typename Tiles::Keys>(p.k) && is_as_stored<typename Tiles::Values>(p.v)) {}

  FLASHPORT_DEVICE void run(const DecodeParams& p, const Range& range, bool keeps_parent, RangeEnds& ends) {
    LeafCursor ahead(range), scout(range);
    if (ahead.done()) return;
    for (int i = 0; i < kLookAhead; ++i) look_up(p, scout, i);
    await_copies();
    __syncwarp();
    for (int slot = 0; !ahead.done(); slot = slot + 1 == kLookAhead ? 0 : slot + 1) {
      const Segment& s = ahead.segment;
      await_free();
      if (ahead.at_segment_start()) bring_query(p, s);
      TokenPlace places[kRowsPerLane];
      const bool whole = as_stored_ && has_all_rows(ahead);
#pragma unroll
      for (int i = 0; i < kRowsPerLane; ++i) places[i] = place_of_row(p, ahead, slot, i, whole);
      look_up(p, scout, slot);  // before the copies, behind which it would wait
      if (whole) {
        aim(p, places, s.kv_head);
        copy_whole<typename Tiles::Keys>(ring_.key_rows);
        await_free();
        copy_whole<typename Tiles::Values>(ring_.value_rows);
      } else {
        copy_part<typename Tiles::Keys>(p.k, places, s.kv_head);
        await_free();
        copy_part<typename Tiles::Values>(p.v, places, s.kv_head);
      }
      ahead.next(p);
    }
    if (block_.wave() == 0) {
      plan_last_tile(p, block_, range.line, keeps_parent, ends, range.segment.start, ahead.segment);
      barrier_signal(kEndsBarrier, ends_threads(kCfg));
    }
    await_copies();
  }

 private:
  // Lane i cares for rows i and 32 + i of the wave's rows; of 16 rows the other lanes know them too.
  FLASHPORT_DEVICE int first_row() const { return block_.wave() * kRowsPerWave; }
  FLASHPORT_DEVICE int row_of_leaf(int i) const { return first_row() + i * kWaveSize + block_.lane() % kRowsAtOnce; }
  FLASHPORT_DEVICE static bool holds(const Segment& s, int token) { return token >= s.key_low && token < s.key_high; }

  // Asks for the page numbers of the leaf that `scout` stands at, and moves it on.
  FLASHPORT_DEVICE void look_up(const DecodeParams& p, LeafCursor& scout, int slot) {
    if (scout.done()) return;
    const Segment& s = scout.segment;
    if (s.pages != nullptr) {
#pragma unroll
      for (int i = 0; i < kRowsPerLane; ++i) {
        const int token = scout.key() + row_of_leaf(i);
        if (!holds(s, token) || block_.lane() >= kRowsAtOnce) continue;
        copy_async<4>(&ring_.pages[slot][row_of_leaf(i)], s.pages + page_of(p, s.pages, token).page, true);
      }
    }
    scout.next(p);
  }
  FLASHPORT_DEVICE TokenPlace place_of_row(const DecodeParams& p, const LeafCursor& ahead, int slot, int i,
                                           bool whole) const {
    const Segment& s = ahead.segment;
    const int token = ahead.key() + row_of_leaf(i);
    if (!whole && !holds(s, token)) return {0, -1};
    return {s.pages == nullptr ? s.seq : ring_.pages[slot][row_of_leaf(i)], page_of(p, s.pages, token).offset};
  }

  FLASHPORT_DEVICE void bring_query(const DecodeParams& p, const Segment& s) {
    mbarrier_wait(&ring_.query_free[query_.tile], query_.phase ^ 1);
    copy_query<kCfg>(p, s, block_, ring_.queries[query_.tile]);
    query_.next();
  }

  FLASHPORT_DEVICE void await_free() const { mbarrier_wait(&ring_.free[place_.tile], place_.phase ^ 1); }

  template <class Layout>
  static constexpr int kWide = Layout::kBytes % 16 == 0 ? 16 : (Layout::kBytes % 8 == 0 ? 8 : 4);

  // Whether the cache's rows are what a tile has, and can be copied in its widest units.
  template <class Layout>
  FLASHPORT_DEVICE static bool is_as_stored(const CacheParams& cache) {
    return cache.copy_unit >= kWide<Layout> && cache.row_bytes == Layout::kBytes;
  }
  FLASHPORT_DEVICE bool has_all_rows(const LeafCursor& ahead) const {
    const int first = ahead.key() + first_row();
    return first >= ahead.segment.key_low && first + kRowsPerWave <= ahead.segment.key_high;
  }

  // Leaves the addresses of the wave's rows in shared memory: shuffles would give halves of addresses, and the moves
  // that join them wait for the copies before to have left.
  FLASHPORT_DEVICE void aim(const DecodeParams& p, const TokenPlace (&places)[kRowsPerLane], int head) {
    __syncwarp();  // the rows of the leaf before have been read
#pragma unroll
    for (int i = 0; i < kRowsPerLane; ++i) {
      if (block_.lane() >= kRowsAtOnce) continue;
      ring_.key_rows[row_of_leaf(i)] = static_cast<const char*>(p.k.data) + row_offset(p.k, places[i], head);
      ring_.value_rows[row_of_leaf(i)] = static_cast<const char*>(p.v.data) + row_offset(p.v, places[i], head);
    }
    __syncwarp();
  }

  // Copy the wave's rows of a tile to the next place of the ring, which is free: all of them, or those that are there.
  template <class Layout>
  FLASHPORT_DEVICE void copy_whole(const char* const (&rows)[kLeafKeys]) {
    char* tile = ring_.tiles[place_.tile];
#pragma unroll
    for (int i = 0; i < kRowsPerLane; ++i) copy_whole_rows<Layout>(tile, rows, first_row() + i * kWaveSize);
    hand_over();
  }
  template <class Layout>
  FLASHPORT_DEVICE void copy_part(const CacheParams& cache, const TokenPlace (&places)[kRowsPerLane], int head) {
    char* tile = ring_.tiles[place_.tile];
#pragma unroll
    for (int i = 0; i < kRowsPerLane; ++i) {
      const int wave_row = first_row() + i * kWaveSize;
      const std::int64_t offset = row_offset(cache, places[i], head);
      if (cache.copy_unit >= kWide<Layout>) {
        copy_rows<Layout, kWide<Layout>>(tile, wave_row, cache, offset);
      } else if (cache.copy_unit >= 4) {
        copy_rows<Layout, 4>(tile, wave_row, cache, offset);
      } else {
        copy_rows<Layout, 2>(tile, wave_row, cache, offset);
        __threadfence_block();
      }
    }
    hand_over();
  }
  FLASHPORT_DEVICE void hand_over() {
    mbarrier_arrive_behind_copies(&ring_.ready[place_.tile]);
    place_.next();
  }

  // Lanes take units of a row side by side.
  template <class Layout>
  FLASHPORT_DEVICE void copy_whole_rows(char* tile, const char* const (&rows)[kLeafKeys], int wave_row) const {
    constexpr int kRows = kRowsAtOnce;
    constexpr int kUnit = kWide<Layout>;
    constexpr int kUnits = Layout::kBytes / kUnit;
    constexpr int kLanes = lanes_of_row(kUnits);
    constexpr int kAtOnce = kWaveSize / kLanes;
    // A lane keeps its column of the tile; rows are a power of two at once, so a row's swizzle is xored in.
    const int byte = block_.lane() % kLanes * kUnit;
    const int first = block_.lane() / kLanes;
    char* to = tile + (wave_row + first) * Layout::kPitch;
    const int column = byte ^ Layout::swizzle(wave_row + first);
    // Addresses first: eight copies then leave one after the other.
    constexpr int kBatch = kRows / kAtOnce < 8 ? kRows / kAtOnce : 8;
#pragma unroll
    for (int batch = 0; batch < kRows; batch += kBatch * kAtOnce) {
      const char* from[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) from[i] = rows[wave_row + batch + i * kAtOnce + first] + byte;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int row = batch + i * kAtOnce;
#pragma unroll
        for (int part = 0; part < kUnits / kLanes; ++part) {
          copy_async<kUnit>(to + row * Layout::kPitch + ((column ^ Layout::swizzle(row)) + part * kLanes * kUnit),
                            from[i] + part * kLanes * kUnit, kReadOncePolicy);
        }
      }
    }
    // Blocks of 34 bytes leave up to three units over, a row for each lane.
#pragma unroll
    for (int unit = kUnits / kLanes * kLanes; unit < kUnits; ++unit) {
      const int row = wave_row + block_.lane();
      if (kRows == kWaveSize || block_.lane() < kRows) {
        copy_async<kUnit>(tile + Layout::offset(row, unit * kUnit), rows[row] + unit * kUnit, kReadOncePolicy);
      }
    }
  }
  static constexpr int lanes_of_row(int units) {
    if (units % 4 != 0) return 16;
    const int even = units & -units;
    return even < kWaveSize ? even : kWaveSize;
  }

  // The same unit by unit, with zeros for rows and dims that are not there.
  template <class Layout, int kUnit>
  FLASHPORT_DEVICE void copy_rows(char* tile, int wave_row, const CacheParams& cache, std::int64_t offset) const {
    constexpr int kUnits = Layout::kBytes / kUnit;
    constexpr int kRows = kRowsAtOnce;
    constexpr int kCopies = kRows * kUnits;
    const char* base = static_cast<const char*>(cache.data);
#pragma unroll 1
    for (int step = 0; step < (kCopies + kWaveSize - 1) / kWaveSize; ++step) {
      const int copy = step * kWaveSize + block_.lane();
      const int row = copy / kUnits;
      const int byte = (copy - row * kUnits) * kUnit;
      const std::int64_t from = __shfl_sync(~0u, offset, row % kRows);
      if (copy >= kCopies) break;
      const bool valid = from >= 0 && byte < cache.row_bytes;
      char* to = tile + Layout::offset(wave_row + row, byte);
      const char* source = valid ? base + from + byte : base;
      if constexpr (kUnit >= 4) {
        copy_async<kUnit>(to, source, valid);
      } else {
        *reinterpret_cast<std::uint16_t*>(to) = valid ? __ldg(reinterpret_cast<const std::uint16_t*>(source)) : 0;
      }
    }
  }

  const Block& block_;
  KvRing<kCfg>& ring_;
  RingPlace<KvRing<kCfg>::kTiles> place_;
  RingPlace<KvRing<kCfg>::kQueries> query_;
  const bool as_stored_;
};

}  // namespace flashport::FLASHPORT_TARGET
