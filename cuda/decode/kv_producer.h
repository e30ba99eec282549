// The waves of a block that do nothing but copy: what kv_pipeline.h's ring is filled by.
#pragma once

#include "cuda/decode/kv_pipeline.h"

namespace flashport::FLASHPORT_TARGET::decode {

// The units that so many bytes are copied in.
constexpr int widest_unit(int bytes) { return bytes % 16 == 0 ? 16 : bytes % 8 == 0 ? 8 : 4; }

// Whether the cache's rows are what a tile has, and can be copied in the widest units.
template <class Layout>
FLASHPORT_DEVICE bool is_as_stored(const CacheParams& cache) {
  return cache.copy_unit >= widest_unit(Layout::kHeadBytes) && cache.row_bytes == Layout::kHeadBytes;
}
// Whether as many heads as there are teams can be copied as one row.
template <class Layout>
FLASHPORT_DEVICE bool has_heads_side_by_side(const CacheParams& cache) {
  const auto bits = reinterpret_cast<std::uintptr_t>(cache.data) |
                    static_cast<std::uintptr_t>(cache.page_stride | cache.token_stride);
  return bits % widest_unit(Layout::kBytes) == 0 && cache.row_bytes == Layout::kHeadBytes &&
         cache.head_stride == Layout::kHeadBytes;
}

// Whether the teams of a block walk through the same tokens side by side, with heads that lie side by side in memory.
template <DecodeConfig kCfg>
FLASHPORT_DEVICE bool teams_share_rows(const DecodeParams& p, const Range& range) {
  constexpr unsigned kTeams = kCfg.tuning.teams;
  using Tiles = KvTiles<kCfg>;
  if (kTeams == 1 || p.num_chunks > 0 || p.row_tiles > 1) return false;
  return p.cuts[range.line.cut].concurrent.value % kTeams == 0 && has_heads_side_by_side<typename Tiles::Keys>(p.cache.k) &&
         has_heads_side_by_side<typename Tiles::Values>(p.cache.v);
}

// The producer waves' share of decode(): the same leaves in the same order. `block` has the producer waves of one team.
// They bring the head of their own team (kHeads 1), or the block's producers share the rows of a leaf out among them
// and bring each row's kHeads neighbouring heads, one for each team, at once: a head of q8_0 begins and ends inside a
// sector, and its 136 bytes are no whole units of 16.
template <DecodeConfig kCfg, int kHeads, class Shared>
class KvProducer {
  static constexpr int kTeams = kCfg.tuning.teams;
  static_assert(kHeads == 1 || kHeads == kTeams);
  static constexpr int kRowsPerWave = kLeafKeys / kCfg.tuning.producer_waves / kHeads;
  static constexpr int kRowsAtOnce = kRowsPerWave < kWaveSize ? kRowsPerWave : kWaveSize;
  static constexpr int kRowsPerLane = kRowsPerWave / kRowsAtOnce;
  static constexpr int kLookAhead = KvRing<kCfg>::kLookAhead;
  using Tiles = KvTiles<kCfg>;
  template <class Layout>
  static constexpr int kUnit = widest_unit(kHeads * Layout::kHeadBytes);

 public:
  FLASHPORT_DEVICE KvProducer(const DecodeParams& p, const Block& block, Shared* teams)
      : block_(block),
        teams_(teams),
        ring_(teams[block.team()].ring),
        as_stored_(is_as_stored<typename Tiles::Keys>(p.cache.k) && is_as_stored<typename Tiles::Values>(p.cache.v)) {}

  FLASHPORT_DEVICE void run(const DecodeParams& p, const Range& range) {
    LeafCursor ahead(range), scout(range);
    if (ahead.done()) return;
    for (int i = 0; i < kLookAhead; ++i) look_up(p, scout, i);
    await_copies();
    __syncwarp();
    for (int slot = 0; !ahead.done(); slot = slot + 1 == kLookAhead ? 0 : slot + 1) {
      const Segment& s = ahead.segment;
      await_free();
      if (ahead.at_segment_start()) bring_query(p, s);
      kv::TokenCoord places[kRowsPerLane];
      const bool whole = as_stored_ && has_all_rows(ahead);
#pragma unroll
      for (int i = 0; i < kRowsPerLane; ++i) places[i] = place_of_row(p, ahead, slot, i, whole);
      if constexpr (kRowsAtOnce < kWaveSize) __syncwarp();  // two lanes have read each page number
      look_up(p, scout, slot);                              // before the copies, behind which it would wait
      if (whole) {
        aim(p, places, first_head(s));
        copy_whole<typename Tiles::Keys>(ring_.key_rows, s.kv_head);
        await_free();
        copy_whole<typename Tiles::Values>(ring_.value_rows, s.kv_head);
      } else {
        copy_part<typename Tiles::Keys>(p.cache.k, places, first_head(s));
        await_free();
        copy_part<typename Tiles::Values>(p.cache.v, places, first_head(s));
      }
      ahead.next(p);
    }
    await_copies();
  }

 private:
  FLASHPORT_DEVICE int first_row() const {
    return ((kHeads == 1 ? 0 : block_.team() * kCfg.tuning.producer_waves) + block_.wave()) * kRowsPerWave;
  }
  FLASHPORT_DEVICE int first_head(const Segment& s) const {
    return kHeads == 1 ? s.kv_head : s.kv_head - block_.team();
  }
  FLASHPORT_DEVICE KvRing<kCfg>& ring_of(int head) const { return kHeads == 1 ? ring_ : teams_[head].ring; }
  // Lane i cares for rows i and 32 + i of the wave's rows; of 16 rows the other lanes know them too.
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
        copy_async<4>(&ring_.pages[slot][row_of_leaf(i)], s.pages + kv::page_coord(p.cache, s.pages, token).page, true);
      }
    }
    scout.next(p);
  }
  FLASHPORT_DEVICE kv::TokenCoord place_of_row(const DecodeParams& p, const LeafCursor& ahead, int slot, int i,
                                               bool whole) const {
    const Segment& s = ahead.segment;
    const int token = ahead.key() + row_of_leaf(i);
    if (!whole && !holds(s, token)) return {0, -1};
    return {s.pages == nullptr ? s.seq : ring_.pages[slot][row_of_leaf(i)],
            kv::page_coord(p.cache, s.pages, token).offset};
  }

  FLASHPORT_DEVICE void bring_query(const DecodeParams& p, const Segment& s) {
    mbarrier_wait(&ring_.query_free[query_.stage], query_.phase ^ 1);
    copy_query<kCfg>(p, s, block_, ring_.queries[query_.stage]);
    query_.next();
  }

  // What lies in a tile of all teams' heads is given back to each team's ring.
  FLASHPORT_DEVICE void await_free() const {
    for (int head = 0; head < kHeads; ++head) mbarrier_wait(&ring_of(head).free[place_.stage], place_.phase ^ 1);
  }

  FLASHPORT_DEVICE bool has_all_rows(const LeafCursor& ahead) const {
    const int first = ahead.key() + first_row();
    return first >= ahead.segment.key_low && first + kRowsPerWave <= ahead.segment.key_high;
  }

  // Leaves the addresses of the wave's rows in shared memory: shuffles would give halves of addresses, and the moves
  // that join them wait for the copies before to have left.
  FLASHPORT_DEVICE void aim(const DecodeParams& p, const kv::TokenCoord (&places)[kRowsPerLane], int head) {
    __syncwarp();  // the rows of the leaf before have been read
#pragma unroll
    for (int i = 0; i < kRowsPerLane; ++i) {
      if (block_.lane() >= kRowsAtOnce) continue;
      ring_.key_rows[row_of_leaf(i)] =
          static_cast<const char*>(p.cache.k.data) + kv::row_offset(p.cache.k, places[i], head);
      ring_.value_rows[row_of_leaf(i)] =
          static_cast<const char*>(p.cache.v.data) + kv::row_offset(p.cache.v, places[i], head);
    }
    __syncwarp();
  }

  // Copy the wave's rows of a tile to the next place of the ring, which is free: all of them, or those that are there.
  template <class Layout>
  FLASHPORT_DEVICE void copy_whole(const char* const (&rows)[kLeafKeys], int head) {
#pragma unroll
    for (int i = 0; i < kRowsPerLane; ++i) copy_whole_rows<Layout>(rows, first_row() + i * kWaveSize, head);
    hand_over();
  }
  template <class Layout>
  FLASHPORT_DEVICE void copy_part(const CacheParams& cache, const kv::TokenCoord (&places)[kRowsPerLane], int head) {
#pragma unroll
    for (int i = 0; i < kRowsPerLane; ++i) {
      const int wave_row = first_row() + i * kWaveSize;
      const std::int64_t offset = kv::row_offset(cache, places[i], head);
      if (kHeads > 1 || cache.copy_unit >= kUnit<Layout>) {
        copy_rows<Layout, kUnit<Layout>>(wave_row, cache, offset, head);
      } else if (cache.copy_unit >= 4) {
        copy_rows<Layout, 4>(wave_row, cache, offset, head);
      } else {
        copy_rows<Layout, 2>(wave_row, cache, offset, head);
        __threadfence_block();
      }
    }
    hand_over();
  }
  FLASHPORT_DEVICE void hand_over() {
    for (int team = 0; team < kTeams; ++team) mbarrier_arrive_on_copies(&ring_of(team).ready[place_.stage]);
    place_.next();
  }
  FLASHPORT_DEVICE char* tile() const { return teams_[0].ring.tiles[place_.stage]; }
  // Where in the tile's rows what the wave brings begins.
  template <class Layout>
  FLASHPORT_DEVICE int first_byte(int head) const {
    return kHeads == 1 ? Layout::head_offset(block_.team(), head, false) : 0;
  }

  // Lanes take units of a row side by side.
  template <class Layout>
  FLASHPORT_DEVICE void copy_whole_rows(const char* const (&rows)[kLeafKeys], int wave_row, int head) const {
    constexpr int kRows = kRowsAtOnce;
    constexpr int kBytes = kUnit<Layout>;
    constexpr int kUnits = kHeads * Layout::kHeadBytes / kBytes;
    constexpr int kLanes = lanes_of_row(kUnits);
    constexpr int kAtOnce = kWaveSize / kLanes;
    // A lane keeps its column of the tile; rows are a power of two at once, so a row's swizzle is xored in.
    const int byte = block_.lane() % kLanes * kBytes;
    const int first = block_.lane() / kLanes;
    char* to = tile() + Layout::row_offset(wave_row + first);
    const int column = Layout::column(first_byte<Layout>(head) + byte) ^ Layout::swizzle(wave_row + first);
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
          const int before = part * kLanes * kBytes;  // whole panels
          copy_async<kBytes>(to + Layout::row_offset(row) + ((column ^ Layout::swizzle(row)) + Layout::column(before)),
                             from[i] + before, kReadOncePolicy);
        }
      }
    }
    // Blocks of 34 bytes leave up to three units over, of all rows at once.
    constexpr int kOverAtOnce = kWaveSize / kRows;
#pragma unroll
    for (int over = kUnits / kLanes * kLanes; over < kUnits; over += kOverAtOnce) {
      const int row = wave_row + block_.lane() / kOverAtOnce;
      const int unit = over + block_.lane() % kOverAtOnce;
      if (kUnits - over >= kOverAtOnce || unit < kUnits) {
        copy_async<kBytes>(tile() + Layout::offset(row, first_byte<Layout>(head) + unit * kBytes),
                           rows[row] + unit * kBytes, kReadOncePolicy);
      }
    }
  }
  static constexpr int lanes_of_row(int units) {
    if (kHeads > 1) return kWaveSize;
    if (units % 4 != 0) return 16;
    const int even = units & -units;
    return even < kWaveSize ? even : kWaveSize;
  }

  // The same unit by unit, with zeros for rows and dims that are not there.
  template <class Layout, int kBytes>
  FLASHPORT_DEVICE void copy_rows(int wave_row, const CacheParams& cache, std::int64_t offset, int head) const {
    constexpr int kUnits = kHeads * Layout::kHeadBytes / kBytes;
    constexpr int kRows = kRowsAtOnce;
    constexpr int kCopies = kRows * kUnits;
    const char* base = static_cast<const char*>(cache.data);
#pragma unroll 1
    for (int step = 0; step < (kCopies + kWaveSize - 1) / kWaveSize; ++step) {
      const int copy = step * kWaveSize + block_.lane();
      const int row = copy / kUnits;
      const int byte = (copy - row * kUnits) * kBytes;
      const std::int64_t from = __shfl_sync(~0u, offset, row % kRows);
      if (copy >= kCopies) break;
      const bool valid = from >= 0 && byte < kHeads * cache.row_bytes;
      char* to = tile() + Layout::offset(wave_row + row, first_byte<Layout>(head) + byte);
      const char* source = valid ? base + from + byte : base;
      if constexpr (kBytes >= 4) {
        copy_async<kBytes>(to, source, valid);
      } else {
        *reinterpret_cast<std::uint16_t*>(to) = valid ? __ldg(reinterpret_cast<const std::uint16_t*>(source)) : 0;
      }
    }
  }

  const Block& block_;
  Shared* teams_;
  KvRing<kCfg>& ring_;
  PipelineState<KvRing<kCfg>::kTiles> place_;
  PipelineState<KvRing<kCfg>::kQueries> query_;
  const bool as_stored_;
};

}  // namespace flashport::FLASHPORT_TARGET::decode
